"""What measures and compares engines beyond `ddtree-trt bench`, from a checkout: `python -m workbench`.

The package never imports it, and no wheel has it.
"""
