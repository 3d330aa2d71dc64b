"""`ddtree-trt check`: whether an engine is lossless up to its rounding, and what its drafter is worth."""
