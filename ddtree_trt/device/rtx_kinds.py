"""The kinds of GPU that TensorRT for RTX compiles for, and those that it does not serve."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_trt.artifact.backends import TENSORRT, TENSORRT_RTX, TORCH

KINDS: Mapping[str, int] = {f"sm{sm}": sm for sm in TENSORRT_RTX.sms}  # name → compute capability, times 10
# Kinds that exist and are not served: what they lack, and what serves them. Data-centre GPUs are TensorRT's own;
# Turing's kernels have neither bf16 nor the float32 product of a head, though TensorRT for RTX knows it.
_TENSORRT = f"is a data-centre GPU, which {TENSORRT_RTX.title} does not serve; use --backend {TENSORRT.name}"
_TORCH = f"is too old for the engine's products in bf16 and float32; use --backend {TORCH.name}"
UNSERVED: Mapping[str, str] = {"sm75": _TORCH, **dict.fromkeys(("sm90", "sm100", "sm103"), _TENSORRT)}
