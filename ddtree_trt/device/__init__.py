"""The machine: processor, memory, sizes of passes, libraries of the GPU."""
