"""The precisions an engine can be built in, stated once: their types and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True)
class Precision:
    dtype: str  # of states, caches unless `cache_bytes` differs, and weights, as ONNX, PyTorch and NumPy call it
    safetensors: str  # the same type in a safetensors header
    value_bytes: int  # of one value of that type
    # How far apart two roundings of the same logit may be, relative to the row's largest: an unfused fp32 network sums
    # thousands of products, 2^8 roundings of 2^-24; in half precisions sums are kept in fp32, and 2^3 roundings of what
    # is stored in between are what is seen. In int8 the last bit of a float32 sum decides to which integer a value is
    # rounded, and layer by layer that grows to a few of 127: on random weights of Qwen3-0.6B's shape 2^-5 was seen. On
    # trained ones it can be more: a difference that fails there may be rounding all the same, which no report can tell
    # from a fault.
    relative_rounding: float
    quantized: bool = False  # weights are 8-bit integers with scales, and rows are while they are multiplied

    @property
    def half(self) -> bool:
        """Whether values have 16 bits, which are what the CUDA kernels compute in."""
        return self.value_bytes == 2

    @property
    def cache_bytes(self) -> int:
        """Of a value in a cache: quantised engines, whose other values are float32, have caches of bfloat16."""
        return 2 if self.quantized else self.value_bytes


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision("float32", "F32", 4, relative_rounding=2.0**-16),
    "fp16": Precision("float16", "F16", 2, relative_rounding=2.0**-8),
    "bf16": Precision("bfloat16", "BF16", 2, relative_rounding=2.0**-5),
    "int8": Precision("float32", "F32", 4, relative_rounding=2.0**-4, quantized=True),
}


def block_drafter_precision(engine: PrecisionName) -> PrecisionName:
    """What a block drafter is computed in: bf16 in an engine of fp16, whose range a drafter's states, made
    of several layers of the target's, may leave without an error. Otherwise the engine's own."""
    return "bf16" if engine == "fp16" else engine
