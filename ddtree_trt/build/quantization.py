"""Checkpoints that NVIDIA ModelOpt quantised to FP8: one static scale per weight, one per input of a projection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import CheckpointError

MODELOPT_CONFIG = "hf_quant_config.json"  # what ModelOpt writes beside the weights
WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"  # beside a projection's `weight`
CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")  # for an FP8 cache; ours has the engine's precision
_ALGORITHM = "FP8"


@dataclass(frozen=True)
class Scales:
    """What a projection's stored FP8 values, and those of the rows it is multiplied with, are multiplied by."""

    weight: float
    input: float


class QuantizedWeights(Protocol):
    """Where a graph finds weights as they are stored; a `Checkpoint` is one."""

    def scales(self, name: str) -> Scales | None:
        """The scales of one weight; None for one that is not quantised."""

    def stored(self, name: str) -> NDArray[np.uint8]:
        """A quantised weight's FP8 values (e4m3) as bytes."""


def check_quantization(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for quantisations that cannot be read, as far as the configuration tells.

    `config` is the content of config.json.
    """
    path = directory / MODELOPT_CONFIG
    found: Any = config.get("quantization_config")
    if found and (not isinstance(found, dict) or found.get("quant_method") != "modelopt"):
        raise CheckpointError(
            f"{directory}: quantization_config is set and not ModelOpt's; use the checkpoint before quantisation"
        )
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error!r}); fetch the checkpoint again") from error
    algorithm = found.get("quant_algo") if isinstance(found, dict) else found
    if algorithm not in (None, _ALGORITHM):
        raise CheckpointError(
            f"{directory} is quantised by {algorithm}, which cannot be read; use {_ALGORITHM}, or the checkpoint "
            "before quantisation"
        )


def float8_values() -> NDArray[np.float32]:
    """The value of every byte as an e4m3 number: sign, 4 bits of exponent, 3 of mantissa; no infinity, two NaNs."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)
