"""Engines for ONNX Runtime."""
