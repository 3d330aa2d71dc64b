"""The ONNX Runtime engine."""
