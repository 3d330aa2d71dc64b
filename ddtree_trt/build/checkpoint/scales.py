"""Scales of quantised projections: finding and checking them, and dequantisation. `quantization` has the layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.tensor_files import Stored, StoredTensor
from ddtree_trt.build.checkpoint.quantization import FORMATS, MODELOPT_CONFIG, Quantization, Values
from ddtree_trt.build.checkpoint.tensorfile import check_dtype, read_float32
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import Shapes

WEIGHT, INPUT, SMOOTH = "weight_scale", "input_scale", "pre_quant_scale"  # where the projection has `weight`
CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")  # for a quantised cache; ours has the engine's precision


@dataclass(frozen=True, eq=False)
class Scales:
    """The scales of a projection's stored values, and the rounding and smoothing of the rows it is multiplied with."""

    values: Values
    group: int  # G
    weight: NDArray[np.float32]  # [] one for all, [out] one per row, [out, in / G] one per group
    input: float | None = None  # rows are rounded to multiples of it
    smooth: NDArray[np.float32] | None = None  # [in]: rows are multiplied by it first


def join_scales(scales: Sequence[Scales]) -> Scales | None:
    """The scales of one projection that has all rows of several; None where one product cannot replace theirs, because
    they round or smooth its input differently or have different groups."""
    first, *others = scales
    for other in others:
        smoothed_alike = np.array_equal(first.smooth, other.smooth)  # type: ignore[arg-type]
        if (first.values, first.input) != (other.values, other.input) or not smoothed_alike:
            return None
    if first.weight.ndim == 0:
        return first if all(s.weight == first.weight for s in others) else None
    if any(s.weight.shape[1:] != first.weight.shape[1:] for s in others):
        return None
    return replace(first, weight=np.concatenate([s.weight for s in scales]))


def scale_name(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('weight')}{kind}"


def find_scales(
    directory: Path, quantization: Quantization | None, stored: Stored, expected: Shapes
) -> dict[str, StoredTensor]:
    """The scales of every quantised weight by name. `expected` are the shapes of the weights before quantisation.
    Raises CheckpointError where one is missing or of the wrong shape, and for a weight that may not be quantised."""
    types = {known.stored for known in FORMATS.values()}
    found = {}
    for weight in (name for name in expected if name in stored and stored[name].dtype in types):
        dtype = stored[weight].dtype
        if quantization is None or dtype != quantization.format.stored:
            finding = f"is for {quantization.algorithm}" if quantization else "is not there"
            where = f"the {MODELOPT_CONFIG} that would say how to read it {finding}; fetch the checkpoint again"
            raise CheckpointError(f"{directory}: {weight} is stored as {dtype}, and {where}")
        if not weight.endswith("_proj.weight"):
            raise CheckpointError(f"{directory}: {weight} is stored as {dtype}; only projections of a layer may be")
        for name, wanted in _scale_shapes(directory, weight, expected[weight], quantization, stored).items():
            shape = stored[name].shape if name in stored else None
            if shape != wanted and (wanted or shape not in ((), (1,))):
                what = "it is missing" if shape is None else f"it has shape {list(shape)}"
                must = f"{name} must be {'one number' if wanted == () else list(wanted)}, and {what}"
                problem = f"{directory}: {weight} is quantised by {quantization.algorithm}, for which {must}"
                raise CheckpointError(f"{problem}; use the checkpoint before quantisation")
            check_dtype(name, stored[name])
            found[name] = stored[name]
    return found


def _scale_shapes(
    directory: Path, weight: str, shape: tuple[int, ...], quantization: Quantization, stored: Stored
) -> Shapes:
    """Shapes by name of the scales that a weight [out, in] must have; () is one number. Raises CheckpointError for a
    weight that its algorithm cannot store."""
    (out, width), layout = shape, quantization.format
    name, smooth = scale_name(weight, WEIGHT), scale_name(weight, SMOOTH)
    shapes: Shapes = {name: (out,) if layout.values == "int8" else ()}
    if layout.values == "int4":
        # Where the configuration does not state the size of a group, the scale's shape does.
        groups = stored[name].shape[-1] if name in stored and stored[name].shape else 1
        group = quantization.group or max(width // max(groups, 1), 1)
        if out % 2 or width % group:
            packed = f"which packs two rows in one and has rows of whole groups, of {group} values here"
            problem = f"{directory}: {weight} [{out}, {width}] cannot be {quantization.algorithm}, {packed}"
            raise CheckpointError(f"{problem}; fetch the checkpoint again")
        shapes[name] = (out, width // group)
    if layout.rounds_inputs:
        shapes[scale_name(weight, INPUT)] = ()
    if layout.smooths and smooth in stored:
        shapes[smooth] = (width,)
    return shapes


def read_scales(weight: str, stored: StoredTensor, quantization: Quantization, quantizers: Stored) -> Scales:
    """The scales of one weight, from those that `find_scales` returned. Raises CheckpointError for one of 0 or less."""
    values: dict[str, NDArray[np.float32]] = {}
    for kind in (WEIGHT, INPUT, SMOOTH):
        if (name := scale_name(weight, kind)) in quantizers:
            values[kind] = read_float32(name, quantizers[name])
            if (least := values[kind].min()) <= 0:
                problem = f"{quantizers[name].file}: {name} is {least:g}, a scale must be positive"
                raise CheckpointError(f"{problem}; fetch it again")
    scale = values[WEIGHT]
    if quantization.format.values == "float8_e4m3fn":
        scale = scale.reshape(())
    step = float(values[INPUT].reshape(())) if INPUT in values else None
    group = stored.shape[1] // (scale.shape[1] if scale.ndim == 2 else 1)
    return Scales(quantization.format.values, group, scale, step, values.get(SMOOTH))


def dequantize(stored: NDArray[np.uint8], scales: Scales) -> NDArray[np.float32]:
    """The float32 weight [out, in] that a projection's bytes and scales stand for, smoothing included."""
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
    """The stored numbers as float32 [out, in], without scales."""
    if kind == "float8_e4m3fn":
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if kind == "int8":
        return stored.view(np.int8).astype(np.float32)
    values = np.empty((2 * stored.shape[0], stored.shape[1]), np.float32)
    signed = stored.view(np.int8)
    values[::2] = (signed << 4) >> 4  # the shift back extends the sign
    values[1::2] = signed >> 4
    return values
