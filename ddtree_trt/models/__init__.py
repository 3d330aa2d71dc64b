"""Architectures, stated once: dimensions, Hugging Face names, shapes and packing of tensors, rotary tables."""
