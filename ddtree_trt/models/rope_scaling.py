"""Scalings of rotary embedding: their types, the numbers each needs, and what of them contradicts itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ddtree_trt.reading import Between

ROPE_BASE = Between(1, 1e15)  # float32 holds both ends
FACTOR, ROTATIONS = Between(1, 1e6), Between(1e-6, 1e6)
POSITIONS_BEFORE = Between(1, 1 << 27)
MAGNITUDE = Between(1e-6, 1e6)

ScalingName = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How a network's frequencies differ from those of its base, under config.json's names.

    `SCALINGS` has the fields that its type uses; the others have their defaults.
    """

    rope_type: ScalingName
    factor: Annotated[float, FACTOR]  # slow frequencies are divided by it
    original_max_position_embeddings: Annotated[int, POSITIONS_BEFORE] = 1  # of the training before the scaling
    low_freq_factor: Annotated[float, ROTATIONS] = 1.0  # rotations within those positions: what has fewer is slow
    high_freq_factor: Annotated[float, ROTATIONS] = 4.0  # what has more stays as it is
    beta_fast: Annotated[float, ROTATIONS] = 32.0  # likewise: what has more stays
    beta_slow: Annotated[float, ROTATIONS] = 1.0  # what has fewer is slow
    truncate: bool = True  # the two bounds are rounded to whole frequencies
    attention_factor: Annotated[float, MAGNITUDE] = 1.0  # cosines and sines are multiplied by it


# Type → the fields of `RopeScaling` that it uses beside its name.
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


def contradiction(theta: float, scaling: RopeScaling | None) -> str | None:
    """What in a scaling cannot be true together, or None: each field is right by itself."""
    if scaling is None:
        return None
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        return f"high_freq_factor {scaling.high_freq_factor:g} is not above low_freq_factor {scaling.low_freq_factor:g}"
    if scaling.beta_fast < scaling.beta_slow:
        return f"beta_fast {scaling.beta_fast:g} is below beta_slow {scaling.beta_slow:g}"
    if scaling.rope_type == "yarn" and theta <= 1:
        return f"rope_theta {theta:g} is not above 1, as rope_type 'yarn' needs"
    return None


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What cosines and sines are multiplied by where a YaRN scaling does not say it (arXiv 2309.00071): 0.1·ln(factor)
    + 1, or with both `mscale` the ratio of 0.1·mscale·ln(factor) + 1 of the two."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
