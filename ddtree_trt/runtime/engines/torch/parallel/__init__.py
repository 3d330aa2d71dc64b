"""Tensor parallelism: one target over several processes, each with a GPU, or on a CPU."""
