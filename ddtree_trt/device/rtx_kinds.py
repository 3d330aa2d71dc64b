"""The kinds of GPU that TensorRT for RTX compiles for, and those that it does not serve."""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, int] = {f"sm{sm}": sm for sm in (80, 86, 89, 120, 121)}  # name → compute capability, times 10
# Kinds that exist and are not served: what they lack, and what serves them. Data-centre GPUs are TensorRT's own;
# Turing's kernels have neither bf16 nor the float32 product of a head, though TensorRT for RTX knows it.
_TENSORRT = "is a data-centre GPU, which TensorRT for RTX does not serve; use --backend tensorrt"
_TORCH = "is too old for the engine's products in bf16 and float32; use --backend torch"
UNSERVED: Mapping[str, str] = {"sm75": _TORCH, **dict.fromkeys(("sm90", "sm100", "sm103"), _TENSORRT)}
