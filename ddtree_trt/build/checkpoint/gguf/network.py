"""What a GGUF file's metadata says of its network, and its tensors in Hugging Face's order.

Metadata is read by its own keys and then checked as the config.json that says the same. Keys of the architecture that
are not known are refused by name, as fields of a config.json are. Scaled positions are stated by keys (linear, YaRN),
or by a tensor of divisors (Llama 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.build.checkpoint.config import ModelConfig, transformer_dims
from ddtree_trt.build.checkpoint.gguf.files import ARCHITECTURE, GgufFiles
from ddtree_trt.build.checkpoint.hybrids import from_gguf
from ddtree_trt.models.decoder import EXPERTS, HEAD_DIM, LAYERS, SHARED, WIDTH, Shape, Shapes, TransformerDims
from ddtree_trt.models.families import (
    DELTA_NAMES,
    EXPERT_NAMES,
    FAMILIES,
    INTERVAL,
    ROTARY_SHARE,
    SHARED_EXPERT,
    Family,
    titles,
)
from ddtree_trt.models.rope_scaling import RopeScaling, scaling_entries
from ddtree_trt.models.rotary import inverse_frequencies
from ddtree_trt.reading import Between, Fields, shown

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

# Field of `TransformerDims` → its key behind the architecture's name. The vocabulary is the embedding's.
_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_positions": "context_length",
}
_VALUE_KEY = "attention.value_length"  # must be what the size of a head is
_ROTARY_KEY = "rope.dimension_count"  # likewise, but in a hybrid
# Of a hybrid, by the entry of config.json that says the same. The size of value heads is that of all of them.
_DELTA_KEYS: Mapping[str, str] = {
    DELTA_NAMES["taps"]: "ssm.conv_kernel",
    DELTA_NAMES["key_dim"]: "ssm.state_size",
    DELTA_NAMES["key_heads"]: "ssm.group_count",
    DELTA_NAMES["value_heads"]: "ssm.time_step_rank",
    INTERVAL: INTERVAL,
}
# Likewise of a mixture of experts.
_EXPERT_KEYS: Mapping[str, str] = {
    EXPERT_NAMES["count"]: "expert_count",
    EXPERT_NAMES["per_token"]: "expert_used_count",
}
_EXPERT_WIDTH_KEY, _SHARED_KEY = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_VALUES_KEY, _SECTIONS_KEY, _NEXTN_KEY = "ssm.inner_size", "rope.dimension_sections", "nextn_predict_layers"
_ROPE_THETA = 10000.0  # where the file does not say, as in llama.cpp
# Keys that change nothing → the values with which they do not; none: whatever they say.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_gating_func": (1,),  # softmax
    _NEXTN_KEY: (0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
    "rope.scale_linear": (1.0,),
}
_SCALING = "rope.scaling."  # begins the keys of a scaling
DIVISORS = "rope_freqs.weight"  # float32 [D/2]: what each frequency is divided by
_LLAMA3_POSITIONS = 8192  # of Llama 3's training, which the divisors are computed with; the default's ramp is theirs
# Type of scaling → field of `RopeScaling` → its key.
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
# Likewise of a scaling; None for keys that are read, or that another type uses. Converters and readers disagree on
# whether an attention factor replaces YaRN's own or multiplies it.
_NEUTRAL_SCALING: Mapping[str, tuple[float, ...] | None] = {
    **dict.fromkeys(("type", "finetuned", *(key for keys in _SCALING_KEYS.values() for key in keys.values()))),
    "attn_factor": (1,),
    "yarn_attn_factor": (1,),
    "yarn_ext_factor": (1, -1),  # −1: what the type has
    "yarn_log_multiplier": (0,),
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.")  # begins the names of a layer's tensors
_STOP_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))

# Architectures whose queries and keys the converter puts in the order of pairs (0, 1), (2, 3), … that llama.cpp rotates
# together; those of the others, and of Hugging Face's files, are (0, D/2), (1, D/2 + 1), ….
_PAIRED = frozenset(("llama",))


def read_gguf_config(files: GgufFiles) -> ModelConfig:
    """The configuration that the metadata states. Raises CheckpointError for what is missing or not implemented."""
    metadata = files.metadata
    family = _family(files)
    architecture = files.architecture
    _refuse_others(metadata, architecture, family)
    sizes = _sizes(files, architecture, family)
    entries = {family.names[field]: value for field, value in sizes.items()}
    prefix = f"{architecture}.{_SCALING}"
    stated = _stated_scaling(metadata, prefix)
    computed = _scaling_of_divisors(files, sizes["head_dim"], sizes["rope_theta"])
    if stated and computed:
        raise metadata.source.fault(f"both {prefix}* and {DIVISORS} scale positions: which is it?")
    entries |= {"rope_scaling": stated or computed} if stated or computed else {}
    entries |= _delta_entries(metadata, architecture, sizes["head_dim"]) if family.delta else {}
    entries |= _expert_entries(metadata, architecture, family) if family.experts else {}
    dims = transformer_dims(Fields(entries, metadata.source), family)
    if dims.experts is not None:
        dims = replace(dims, experts=replace(dims.experts, stacked=True))
    token = Between(0, dims.vocab_size - 1)
    stops = [metadata.integer(key, token) for key in _STOP_TOKENS if metadata.has(key)]
    return ModelConfig(dims=dims, tied=_HEAD not in files.tensors, stop_token_ids=tuple(dict.fromkeys(stops)))


def _family(files: GgufFiles) -> Family:
    architecture = files.architecture
    read = {family.in_gguf or name: family for name, family in FAMILIES.items()}
    if architecture not in read:
        types, kinds = ", ".join(map(repr, read)), titles("and", read.values())
        raise files.metadata.fault(
            ARCHITECTURE, f"is {shown(architecture)}, only {kinds} models ({types}) are supported in GGUF files"
        )
    return read[architecture]


def _refuse_others(metadata: Fields, architecture: str, family: Family) -> None:
    keys: dict[str, tuple[Any, ...] | None] = dict.fromkeys((*_KEYS.values(), "vocab_size", _VALUE_KEY, _ROTARY_KEY))
    keys |= {**_NEUTRAL, **{f"{_SCALING}{key}": values for key, values in _NEUTRAL_SCALING.items()}}
    if family.delta:
        # Of a text all positions of a vision-language model are the same; what predicts several tokens is left out.
        keys |= dict.fromkeys((*_DELTA_KEYS.values(), _VALUES_KEY, _SECTIONS_KEY, _NEXTN_KEY))
    if family.experts:
        keys |= dict.fromkeys((*_EXPERT_KEYS.values(), _EXPERT_WIDTH_KEY, _SHARED_KEY))
    for key, value in metadata.data.items():
        name = key.removeprefix(f"{architecture}.")
        values = keys.get(name, ())
        if name == key or values is None or value in values:
            continue
        only = f"; only {values[0]!r} is" if values else ""
        raise metadata.fault(key, f"is {shown(value)}, which is not implemented{only}")


def _delta_entries(metadata: Fields, architecture: str, head_dim: int) -> dict[str, Any]:
    """The entries of a config.json for a hybrid's delta nets, and for how much of a head is rotated."""
    entries = {name: metadata.integer(f"{architecture}.{key}", LAYERS) for name, key in _DELTA_KEYS.items()}
    heads, key = entries[DELTA_NAMES["value_heads"]], f"{architecture}.{_VALUES_KEY}"
    if (width := metadata.integer(key, WIDTH)) % heads:
        raise metadata.fault(key, f"is {width}, no multiple of {architecture}.ssm.time_step_rank {heads}")
    rotated = metadata.integer(f"{architecture}.{_ROTARY_KEY}", HEAD_DIM)
    return {**entries, DELTA_NAMES["value_dim"]: width // heads, ROTARY_SHARE: rotated / head_dim}


def _expert_entries(metadata: Fields, architecture: str, family: Family) -> dict[str, Any]:
    """The same for a mixture of experts, whose weights llama.cpp divides by their sum."""
    entries = {name: metadata.integer(f"{architecture}.{key}", EXPERTS) for name, key in _EXPERT_KEYS.items()}
    if SHARED_EXPERT in family.defaults:
        entries[SHARED_EXPERT] = metadata.integer(f"{architecture}.{_SHARED_KEY}", SHARED)
    return {**entries, EXPERT_NAMES["normalised"]: True}


def _sizes(files: GgufFiles, architecture: str, family: Family) -> dict[str, Any]:
    """Fields of `TransformerDims` that families do not fix, each within its own bounds."""
    metadata, kinds = files.metadata, get_type_hints(TransformerDims, include_extras=True)
    if _EMBEDDING not in files.tensors:
        raise metadata.source.fault(f"it lacks {_EMBEDDING}: is it a whole model?")
    vocabulary = files.tensors[_EMBEDDING].shape[0]
    stated = metadata.optional(f"{architecture}.vocab_size", int)
    if stated not in (None, vocabulary):
        raise metadata.fault(f"{architecture}.vocab_size", f"is {stated}, but {_EMBEDDING} has {vocabulary} rows")

    names = {**_KEYS, **({"intermediate_size": _EXPERT_WIDTH_KEY} if family.experts else {})}

    def read(field: str, default: Any = None) -> Any:
        key = f"{architecture}.{names[field]}"
        return metadata.value(key, kinds[field], *(() if default is None else (default,)))

    heads, hidden = read("num_heads"), read("hidden_size")
    sizes = {field: read(field) for field in ("num_layers", "intermediate_size", "rms_norm_eps", "max_positions")}
    size = read("head_dim", hidden // heads)
    if family.delta:  # layers that predict several tokens are counted, at the end
        sizes["num_layers"] -= metadata.integer(f"{architecture}.{_NEXTN_KEY}", Between(0, sizes["num_layers"] - 1), 0)
    for key in (_VALUE_KEY,) if family.delta else (_VALUE_KEY, _ROTARY_KEY):
        if (found := metadata.value(f"{architecture}.{key}", int, size)) != size:
            raise metadata.fault(f"{architecture}.{key}", f"is {found}, which is not implemented; only {size} is")
    return {
        **sizes,
        "vocab_size": vocabulary,
        "num_heads": heads,
        "hidden_size": hidden,
        "head_dim": size,
        "num_kv_heads": read("num_kv_heads", heads),
        "rope_theta": read("rope_theta", _ROPE_THETA),
    }


def _stated_scaling(metadata: Fields, prefix: str) -> dict[str, Any]:
    """The entries of a config.json; none for plain rotary embedding."""
    kind = metadata.text(f"{prefix}type", "linear")  # what a factor without a type is
    if kind not in _SCALING_KEYS:
        raise metadata.fault(f"{prefix}type", f"is {shown(kind)}, which is not implemented; only linear and yarn are")
    factor = metadata.data.get(f"{prefix}factor", 0 if kind == "linear" else None)
    if kind == "none" or factor in (0, 1):  # 0 is llama.cpp's for none
        return {}
    kinds = get_type_hints(RopeScaling, include_extras=True)
    used = {field: f"{prefix}{key}" for field, key in _SCALING_KEYS[kind].items()}
    stated = {f: metadata.value(k, kinds[f]) for f, k in used.items() if f == "factor" or k in metadata.data}
    return {"rope_type": kind, **stated}


def _scaling_of_divisors(files: GgufFiles, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling where the tensor holds what it computes, in float32, and no entries where all are 1."""
    if DIVISORS not in files.tensors or ((divisors := files.read(DIVISORS)) == 1).all():
        return {}
    largest = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and largest > 1:
        scaling = RopeScaling("llama3", largest, _LLAMA3_POSITIONS)
        expected = inverse_frequencies(head_dim, theta) / inverse_frequencies(head_dim, theta, scaling)
        if np.allclose(divisors, expected, rtol=1e-4, atol=0):
            return scaling_entries(scaling)
    raise files.metadata.source.fault(
        f"{DIVISORS} scales positions in another way than Llama 3.1 does ({_LLAMA3_POSITIONS} positions, 1 to 4 "
        "rotations), which is not implemented"
    )


def stored_tensors(files: GgufFiles, shapes: Shapes, dims: TransformerDims) -> dict[str, Shapes]:
    """By Hugging Face name: GGUF's names of the tensors that one is made of, one below the other, and their shapes
    there."""
    pieces = {name: _pieces(files, name, shape, dims) for name, shape in shapes.items()}
    names = files.names([asked for some in pieces.values() for asked in some], dims.num_layers)
    return {
        name: {names[asked]: tuple(size for size in shape if size > 1) or (1,) for asked, shape in some.items()}
        for name, some in pieces.items()
    }


def _pieces(files: GgufFiles, name: str, shape: Shape, dims: TransformerDims) -> Shapes:
    """The same by the names that GGUF's are found by. The converter leaves out axes of 1."""
    if dims.delta and name.endswith("in_proj_qkvz.weight"):
        rows = {"qkv": dims.delta.channels, "z": shape[0] - dims.delta.channels}
        return {name.replace("qkvz", part): (count, *shape[1:]) for part, count in rows.items()}
    if len(shape) == 3 and name.endswith("experts.gate_up_proj"):
        if any(stored.endswith("ffn_gate_up_exps.weight") for stored in files.tensors):
            return {f"{name}.weight": shape}
        half = (shape[0], shape[1] // 2, shape[2])
        return {f"{name.replace('gate_up', part)}.weight": half for part in ("gate", "up")}
    return {name if name.endswith((".weight", ".bias", "A_log", "dt_bias")) else f"{name}.weight": shape}


def unused_tensors(files: GgufFiles, dims: TransformerDims) -> set[str]:
    """Those of a hybrid's layers behind the last, which predict several tokens."""
    if dims.delta is None:
        return set()
    return {name for name in files.tensors if (at := _LAYER.match(name)) and int(at[1]) >= dims.num_layers}


def read_tensor(files: GgufFiles, stored: Shapes, shape: Shape, dims: TransformerDims) -> NDArray[np.float32]:
    """A float32 copy of a tensor by what `stored_tensors` says of it, its rows in Hugging Face's order, a hybrid's in
    our form."""
    pieces = [_read(files, name, dims) for name in stored]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-2)
    return values if len(shape) > 2 else values.reshape(shape)


def _read(files: GgufFiles, name: str, dims: TransformerDims) -> NDArray[np.float32]:
    values, part = files.read(name), name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if files.architecture not in _PAIRED:
        return from_gguf(part, values, dims)
    heads = {"attn_q": dims.num_heads, "attn_k": dims.num_kv_heads}.get(part)
    if heads is None:
        return values
    pairs = values.reshape(heads, dims.head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
