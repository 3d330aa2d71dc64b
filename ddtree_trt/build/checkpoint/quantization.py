"""Formats of checkpoints that NVIDIA ModelOpt quantised: those that can be read, and how they store projections.

A projection [out, in] as ModelOpt's Hugging Face export writes it (NVIDIA/TensorRT-Model-Optimizer at 5a4242fa, in
modelopt/torch/export: `pack_int4_in_uint8`, `to_quantized_weight` and `process_layer_quant_config` of quant_utils.py,
`_export_quantized_weight` of unified_export_hf.py):

| quant_algo          | weight                      | weight_scale    | input_scale | pre_quant_scale |
| ------------------- | --------------------------- | --------------- | ----------- | --------------- |
| FP8                 | F8_E4M3 [out, in]           | one             | one         |                 |
| W8A8_SQ_PER_CHANNEL | I8 [out, in]                | [out]           | one         | [in] or none    |
| W8A16               | I8 [out, in]                | [out]           |             |                 |
| W4A16_AWQ           | U8 [out / 2, in]: two rows, | [out, in / G]   |             | [in] or none    |
|                     | the even one in the low bits| G = group_size  |             |                 |

The product is (x · pre_quant_scale, rounded to multiples of input_scale) · (weight · weight_scale). Every scheme is
symmetric. AWQ folds `pre_quant_scale` into a norm before the projection where there is one, and INT4 without AWQ has
none; both bear the name W4A16_AWQ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Between, Fields, Source, read_object, shown

MODELOPT_CONFIG = "hf_quant_config.json"  # what ModelOpt writes beside the weights
_DEFAULT_GROUP = 128  # of ModelOpt's recipes, for an estimate where config.json does not say
_GROUP = Between(1, 1 << 20)

Values = Literal["float8_e4m3fn", "int8", "int4"]  # as ONNX calls them


@dataclass(frozen=True)
class Format:
    values: Values
    stored: str  # safetensors' name of the weight's type
    rounds_inputs: bool
    smooths: bool  # a projection may have a pre_quant_scale


FORMATS: Mapping[str, Format] = {
    "FP8": Format("float8_e4m3fn", "F8_E4M3", rounds_inputs=True, smooths=False),
    "W8A8_SQ_PER_CHANNEL": Format("int8", "I8", rounds_inputs=True, smooths=True),
    "W8A16": Format("int8", "I8", rounds_inputs=False, smooths=False),
    "W4A16_AWQ": Format("int4", "U8", rounds_inputs=False, smooths=True),
}


@dataclass(frozen=True)
class Quantization:
    algorithm: str
    group: int | None  # values of a row that share a scale; None where the configuration does not say
    excluded: tuple[str, ...]  # patterns of modules that are not quantised

    @property
    def format(self) -> Format:
        return FORMATS[self.algorithm]

    def covers(self, weight: str) -> bool:
        """Whether a weight is quantised, as far as the configuration tells."""
        module = weight.removesuffix(".weight")
        return module.endswith("_proj") and not any(fnmatchcase(module, pattern) for pattern in self.excluded)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // (2 if self.format.values == "int4" else 1), *shape[1:])

    def weight_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Bytes of a quantised projection [out, in] and its scales, which are in a precision of `item_bytes`."""
        out, width = shape
        groups = -(-width // (self.group or _DEFAULT_GROUP))
        scales = {"float8_e4m3fn": 1, "int8": out, "int4": out * groups}[self.format.values]
        return math.prod(self.stored_shape(shape)) + item_bytes * scales


def read_quantization(directory: Path, config: Fields) -> Quantization | None:
    """How a checkpoint is quantised; None where it is not. `config` is the content of config.json. Raises
    CheckpointError for quantisations that cannot be read, as far as the configuration tells."""
    section, path = config.section("quantization_config"), directory / MODELOPT_CONFIG
    advice = "use the checkpoint before quantisation"
    if section.data and section.data.get("quant_method") != "modelopt":
        raise CheckpointError(f"{directory}: quantization_config is set and not ModelOpt's; {advice}")
    if path.is_file():
        source = Source(str(path), CheckpointError, "fetch the checkpoint again")
        whole = Fields(read_object(path, source), source)
        if not whole.has("quantization"):
            raise whole.fault("quantization", "is missing")
        section = whole.section("quantization")
    if not section.has("quant_algo"):
        return None
    algorithm = section.text("quant_algo")
    if algorithm not in FORMATS:
        problem = f"{directory} is quantised by {shown(algorithm)}, which cannot be read"
        raise CheckpointError(f"{problem}; use {', '.join(FORMATS)}, or the checkpoint before quantisation")
    if section.flag("has_zero_point", False):
        raise section.fault("has_zero_point", "is set, only symmetric quantisation can be read")
    # ModelOpt calls the same list `ignore` in config.json.
    excluded = section.optional("exclude_modules", list[str]) or section.optional("ignore", list[str]) or []
    return Quantization(algorithm, section.optional("group_size", Annotated[int, _GROUP]), tuple(excluded))
