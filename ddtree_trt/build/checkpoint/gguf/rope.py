"""What a GGUF file says of scaled positions: keys of its metadata (linear, YaRN), or a tensor of divisors (Llama 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np

from ddtree_trt.build.checkpoint.gguf.files import GgufFiles
from ddtree_trt.models.rope_scaling import RopeScaling, scaling_entries
from ddtree_trt.models.rotary import inverse_frequencies
from ddtree_trt.reading import Fields, shown

SCALING = "rope.scaling."  # begins the keys behind the architecture's name
DIVISORS = "rope_freqs.weight"  # float32 [D/2]: what each frequency is divided by

# Type → field of `RopeScaling` → its key.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
# Keys of which no type makes use → the values with which they change nothing. Converters and readers disagree on
# whether an attention factor replaces YaRN's own or multiplies it.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attn_factor": (1,),
    "yarn_attn_factor": (1,),
    "yarn_ext_factor": (1, -1),  # −1: what the type has
    "yarn_log_multiplier": (0,),
}
_IGNORED = frozenset(("finetuned", *(key for keys in _KEYS.values() for key in keys.values())))  # by types without it
_LLAMA3_POSITIONS = 8192  # of Llama 3's training, which the divisors are computed with; the default's ramp is theirs


def rope_scaling(files: GgufFiles, architecture: str, head_dim: int, theta: float) -> dict[str, Any]:
    """The entries of a config.json that say what the file says; none for plain rotary embedding.

    Raises CheckpointError for a scaling that is not implemented, and for one stated in both ways.
    """
    stated = _from_metadata(files.metadata, f"{architecture}.{SCALING}")
    computed = _from_divisors(files, head_dim, theta)
    if stated and computed:
        raise files.metadata.source.fault(
            f"both {architecture}.{SCALING}* and {DIVISORS} scale positions: which is it?"
        )
    scaling = stated or computed
    return {"rope_scaling": scaling} if scaling else {}


def _from_metadata(metadata: Fields, prefix: str) -> dict[str, Any]:
    kind = metadata.text(f"{prefix}type", "linear")  # what a factor without a type is
    if kind not in _KEYS:
        raise metadata.fault(f"{prefix}type", f"is {shown(kind)}, which is not implemented; only linear and yarn are")
    given = {key.removeprefix(prefix): value for key, value in metadata.data.items() if key.startswith(prefix)}
    for key, value in given.items():
        neutral = _NEUTRAL.get(key, ())
        if key != "type" and key not in _IGNORED and value not in neutral:
            only = f"; only {neutral[0]} is" if neutral else ""
            raise metadata.fault(f"{prefix}{key}", f"is {shown(value)}, which is not implemented{only}")
    if kind == "none" or given.get("factor", 0 if kind == "linear" else None) in (0, 1):  # 0 is llama.cpp's for none
        return {}
    kinds = get_type_hints(RopeScaling, include_extras=True)
    used = {field: f"{prefix}{key}" for field, key in _KEYS[kind].items() if field == "factor" or key in given}
    return {"rope_type": kind, **{field: metadata.value(key, kinds[field]) for field, key in used.items()}}


def _from_divisors(files: GgufFiles, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling where the tensor holds what it computes, in float32, and no entries where all are 1."""
    if DIVISORS not in files.tensors:
        return {}
    divisors = files.read(DIVISORS)
    if (divisors == 1).all():
        return {}
    largest = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and np.isfinite(largest) and largest > 1:
        scaling = RopeScaling("llama3", largest, _LLAMA3_POSITIONS)
        expected = inverse_frequencies(head_dim, theta) / inverse_frequencies(head_dim, theta, scaling)
        if np.allclose(divisors, expected, rtol=1e-4, atol=0):
            return scaling_entries(scaling)
    raise files.metadata.source.fault(
        f"{DIVISORS} scales positions in another way than Llama 3.1 does ({_LLAMA3_POSITIONS} positions, 1 to 4 "
        "rotations), which is not implemented"
    )
