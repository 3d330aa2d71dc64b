"""The TensorRT engine."""
