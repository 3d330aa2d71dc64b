"""The GPU libraries of ddtree-trt: CUDA kernels, TensorRT plugins and torch operators, found by `ddtree_trt.plugins`.

They carry CUDA 13's runtime and need NVIDIA's driver 580 or newer. The operators are for the minor release of torch
that the extra `torch` of this wheel names.
"""
