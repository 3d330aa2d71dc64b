"""What lies beside a quantised projection's weight, checked, and what its bytes stand for. Layouts: `quantization`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.safetensor_header import StoredTensor
from ddtree_trt.build.checkpoint.quantization import MODELOPT_CONFIG, STORED_TYPES, Quantization, Values
from ddtree_trt.build.checkpoint.tensorfile import check_dtype, read_float32
from ddtree_trt.errors import CheckpointError

WEIGHT, INPUT, SMOOTH = "weight_scale", "input_scale", "pre_quant_scale"  # beside a projection's `weight`
CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")  # for a quantised cache; ours has the engine's precision


@dataclass(frozen=True, eq=False)
class Scales:
    """What a projection's stored values are multiplied by, and what is done to the rows it is multiplied with."""

    values: Values
    group: int  # G
    weight: NDArray[np.float32]  # [] one for all, [out] one per row, [out, in / G] one per group
    input: float | None = None  # rows are rounded to multiples of it
    smooth: NDArray[np.float32] | None = None  # [in]: rows are multiplied by it first


class QuantizedWeights(Protocol):
    """Where a graph finds weights as they are stored; a `Checkpoint` is one."""

    def scales(self, name: str) -> Scales | None:
        """The scales of one weight; None for one that is not quantised."""

    def stored(self, name: str) -> NDArray[np.uint8]:
        """A quantised weight's bytes."""


def side_by_side(scales: Sequence[Scales]) -> Scales | None:
    """The scales of several projections as those of one that has all their rows; None where no single product with
    the same rows is equal."""
    first, *others = scales
    for other in others:
        if (first.values, first.input) != (other.values, other.input) or not _same(first.smooth, other.smooth):
            return None
    if first.weight.ndim == 0:
        return first if all(s.weight == first.weight for s in others) else None
    if any(s.weight.shape[1:] != first.weight.shape[1:] for s in others):
        return None
    return replace(first, weight=np.concatenate([s.weight for s in scales]))


def _same(a: NDArray[np.float32] | None, b: NDArray[np.float32] | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)


def beside(weight: str, kind: str) -> str:
    """The name of a projection's scale."""
    return f"{weight.removesuffix('weight')}{kind}"


def find_scales(
    directory: Path,
    quantization: Quantization | None,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
) -> dict[str, StoredTensor]:
    """The scales of every quantised weight by name. `expected` are the shapes of the weights as they were.

    Raises CheckpointError where one is missing or of the wrong shape, and for a weight that may not be quantised.
    """
    found = {}
    for weight, shape in expected.items():
        if weight not in stored or stored[weight].dtype not in STORED_TYPES:
            continue
        dtype = stored[weight].dtype
        if quantization is None or dtype != quantization.format.stored:
            told = f"is for {quantization.algorithm}" if quantization else "is not there"
            raise CheckpointError(
                f"{directory}: {weight} is stored as {dtype}, and the {MODELOPT_CONFIG} that would say how to read it "
                f"{told}; fetch the checkpoint again"
            )
        if not weight.endswith("_proj.weight"):
            raise CheckpointError(f"{directory}: {weight} is stored as {dtype}; only projections of a layer may be")
        for name, wanted in _wanted(directory, weight, shape, quantization, stored).items():
            shape_found = stored[name].shape if name in stored else None
            if shape_found != wanted and (wanted or shape_found not in ((), (1,))):
                what = "it is missing" if shape_found is None else f"it has shape {list(shape_found)}"
                raise CheckpointError(
                    f"{directory}: {weight} is quantised by {quantization.algorithm}, for which {name} must be "
                    f"{'one number' if wanted == () else list(wanted)}, and {what}; quantise again, or use the "
                    "checkpoint before quantisation"
                )
            check_dtype(name, stored[name])
            found[name] = stored[name]
    return found


def _wanted(
    directory: Path,
    weight: str,
    shape: tuple[int, ...],
    quantization: Quantization,
    stored: Mapping[str, StoredTensor],
) -> dict[str, tuple[int, ...]]:
    """Shapes of what must lie beside a weight [out, in]; () is one number."""
    (out, width), layout = shape, quantization.format
    name, smooth = beside(weight, WEIGHT), beside(weight, SMOOTH)
    wanted: dict[str, tuple[int, ...]] = {name: (out,) if layout.values == "int8" else ()}
    if layout.values == "int4":
        # config.json alone does not say how large a group is; then the scale does.
        groups = stored[name].shape[-1] if name in stored and stored[name].shape else 1
        group = quantization.group or max(width // max(groups, 1), 1)
        if out % 2 or width % group:
            raise CheckpointError(
                f"{directory}: {weight} [{out}, {width}] cannot be {quantization.algorithm}, which packs two rows in "
                f"one and has rows of whole groups, of {group} values here; fetch the checkpoint again"
            )
        wanted[name] = (out, width // group)
    if layout.rounds_inputs:
        wanted[beside(weight, INPUT)] = ()
    if layout.smooths and smooth in stored:
        wanted[smooth] = (width,)
    return wanted


def read_scales(
    weight: str, stored: StoredTensor, quantization: Quantization, quantizers: Mapping[str, StoredTensor]
) -> Scales:
    """The scales of one weight, of those that `find_scales` found. Raises CheckpointError for one of 0 or less."""

    def read(kind: str) -> NDArray[np.float32] | None:
        name = beside(weight, kind)
        if name not in quantizers:
            return None
        values = read_float32(name, quantizers[name])
        if values.min() <= 0:
            file = quantizers[name].file
            raise CheckpointError(f"{file}: {name} is {values.min():g}, a scale must be positive; fetch it again")
        return values

    scale, rounding = read(WEIGHT), read(INPUT)
    assert scale is not None, "who asks has found scales"
    if quantization.format.values == "float8_e4m3fn":
        scale = scale.reshape(())
    step = None if rounding is None else float(rounding.reshape(()))
    group = stored.shape[1] // (scale.shape[1] if scale.ndim == 2 else 1)
    return Scales(quantization.format.values, group, scale, step, read(SMOOTH))


def dequantize(stored: NDArray[np.uint8], scales: Scales) -> NDArray[np.float32]:
    """What the bytes of a projection [out, in] stand for, in a product with rows as they are: float32 [out, in]."""
    values = _values(stored, scales.values)
    if scales.weight.ndim == 2:
        grouped = values.reshape(len(values), -1, scales.group)  # a view
        grouped *= scales.weight[:, :, None]
    else:
        values *= scales.weight[:, None] if scales.weight.ndim else scales.weight
    if scales.smooth is not None:
        values *= scales.smooth
    return values


def _values(stored: NDArray[np.uint8], kind: Values) -> NDArray[np.float32]:
    if kind == "float8_e4m3fn":
        return _FLOAT8[stored]
    if kind == "int8":
        return stored.view(np.int8).astype(np.float32)
    values = np.empty((2 * stored.shape[0], stored.shape[1]), np.float32)
    signed = stored.view(np.int8)
    values[::2] = (signed << 4) >> 4  # the shift back brings the sign down
    values[1::2] = signed >> 4
    return values


def _float8() -> NDArray[np.float32]:
    """The value of every byte as an e4m3 number: sign, 4 bits of exponent, 3 of mantissa; no infinity, two NaNs."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


_FLOAT8 = _float8()
