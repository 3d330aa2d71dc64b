"""The target and the drafter as ONNX graphs."""
