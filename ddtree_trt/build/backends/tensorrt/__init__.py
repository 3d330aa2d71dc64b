"""Engines for TensorRT."""
