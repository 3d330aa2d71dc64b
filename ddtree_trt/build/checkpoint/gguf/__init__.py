"""Reading GGUF files, the checkpoints of llama.cpp."""
