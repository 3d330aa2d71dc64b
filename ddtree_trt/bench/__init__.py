"""`ddtree-trt bench`: methods and budgets on the same prompts of the same engine, interleaved."""
