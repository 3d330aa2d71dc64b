"""Reading checkpoints of Hugging Face's layout."""
