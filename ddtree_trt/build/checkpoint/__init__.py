"""Reading checkpoints: Hugging Face's layout, and GGUF files."""
