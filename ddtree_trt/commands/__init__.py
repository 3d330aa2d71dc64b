"""The commands of `ddtree-trt`, one module each."""
