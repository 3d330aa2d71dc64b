"""What a GGUF file's metadata says of its network, and its tensors in Hugging Face's order.

Metadata is read as the entries of the config.json that says the same. Keys of the architecture that are not known are
refused by name. Scaled positions are stated by keys (linear, YaRN), or by a tensor of divisors (Llama 3).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.build.checkpoint.config import ModelConfig, transformer_dims
from ddtree_trt.build.checkpoint.dialect import Known, refuse_unknown
from ddtree_trt.build.checkpoint.gguf.files import ARCHITECTURE, GgufFile
from ddtree_trt.build.checkpoint.hybrids import from_gguf
from ddtree_trt.models.decoder import HEAD_DIM, HEADS, LAYERS, WIDTH, Shape, Shapes, TransformerDims
from ddtree_trt.models.families import FAMILIES, INTERVAL, ROTARY_SHARE, SHARED_EXPERT, Family, titles
from ddtree_trt.models.rope_scaling import RopeScaling
from ddtree_trt.models.rotary import inverse_frequencies
from ddtree_trt.reading import Between, Fields, shown

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

# Entry of a config.json → the key, behind the architecture's name, that says the same. The vocabulary is the
# embedding's.
_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    SHARED_EXPERT: "expert_shared_feed_forward_length",
}
_DELTA_KEYS: Mapping[str, str] = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    INTERVAL: INTERVAL,
}
_VALUE_SIZE = "attention.value_length"  # must be what the size of a head is
_ROTATED = "rope.dimension_count"  # likewise, but in a hybrid
_VALUES, _SECTIONS, _PREDICTING = "ssm.inner_size", "rope.dimension_sections", "nextn_predict_layers"
_NEUTRAL: Known = {
    **dict.fromkeys((*_KEYS.values(), "vocab_size", _VALUE_SIZE, _ROTATED)),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_gating_func": (1,),  # softmax
    _PREDICTING: (0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
    "rope.scale_linear": (1.0,),
}
# Of a hybrid: of a text all positions of a vision-language model are the same; what predicts several tokens is left
# out.
_DELTA: Known = dict.fromkeys((*_DELTA_KEYS.values(), _VALUES, _SECTIONS, _PREDICTING))
_SCALING = "rope.scaling"  # begins the keys of a scaling
DIVISORS = "rope_freqs.weight"  # float32 [D/2]: what each frequency is divided by
_LLAMA3_POSITIONS = 8192  # of Llama 3's training, which the divisors are computed with; the default's ramp is theirs
# Type of scaling → its entry in config.json → its key.
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
# Converters and readers disagree on whether an attention factor replaces YaRN's own or multiplies it.
_NEUTRAL_SCALING: Known = {
    **dict.fromkeys(("type", "finetuned", *_SCALING_KEYS["yarn"].values())),
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


@dataclass(frozen=True)
class _Entries(Fields):
    """Entries of a config.json that were read from keys; messages name these."""

    keys: Mapping[str, str] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return super().place(self.keys.get(name, name))


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration that the metadata states. Raises CheckpointError for what is missing or not implemented."""
    metadata, family, own = file.metadata, _family(file), f"{file.architecture}."
    _refuse_others(metadata, own, family)
    keys = {**_KEYS, **(_EXPERT_KEYS if family.experts else {}), **(_DELTA_KEYS if family.delta else {})}
    read = {*family.names.values(), *family.defaults}
    keys = {name: own + key for name, key in keys.items() if name in read}
    heads = metadata.integer(keys["num_attention_heads"], HEADS)
    # Where the file does not say, llama.cpp has these.
    size = metadata.integer(keys["head_dim"], HEAD_DIM, metadata.integer(keys["hidden_size"], WIDTH) // heads or 1)
    entries: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": size, "rope_theta": 10000.0}
    entries |= {name: metadata.data[key] for name, key in keys.items() if metadata.has(key)}
    if missing := [key for name, key in keys.items() if name not in entries]:
        raise metadata.source.fault(f"it has no {missing[0]}")
    entries["vocab_size"] = _vocabulary(file, own)
    for key in (_VALUE_SIZE,) if family.delta else (_VALUE_SIZE, _ROTATED):
        if (found := metadata.data.get(own + key, size)) != size:
            raise metadata.fault(own + key, f"is {shown(found)}, which is not implemented; only {size} is")
    if family.experts:
        entries["norm_topk_prob"] = True  # llama.cpp divides a token's weights by their sum
    if family.delta:
        entries |= _of_hybrid(metadata, own, size)
    if stated := _stated_scaling(metadata, f"{own}{_SCALING}."):
        entries["rope_scaling"] = stated
    places = {**keys, "rope_scaling": own + _SCALING}
    dims = transformer_dims(_Entries(entries, metadata.source, keys=places), family)
    if scaling := _scaling_of_divisors(file, dims):
        if stated:
            raise metadata.source.fault(f"both {own}{_SCALING}.* and {DIVISORS} scale positions: which is it?")
        dims = replace(dims, rope_scaling=scaling)
    if dims.experts is not None:
        dims = replace(dims, experts=replace(dims.experts, stacked=True))
    token = Between(0, dims.vocab_size - 1)
    stops = [metadata.integer(key, token) for key in _STOP_TOKENS if metadata.has(key)]
    return ModelConfig(dims=dims, tied=_HEAD not in file.tensors, stop_token_ids=tuple(dict.fromkeys(stops)))


def _family(file: GgufFile) -> Family:
    architecture = file.architecture
    read = {family.in_gguf or name: family for name, family in FAMILIES.items()}
    if architecture not in read:
        types, kinds = ", ".join(map(repr, read)), titles("and", read.values())
        offered = f"only {kinds} models ({types}) are supported in GGUF files"
        raise file.metadata.fault(ARCHITECTURE, f"is {shown(architecture)}, {offered}")
    return read[architecture]


def _refuse_others(metadata: Fields, own: str, family: Family) -> None:
    """Raises the metadata's error for the first key of the architecture that is not known, or not with its value."""
    known = {**_NEUTRAL, **{f"{_SCALING}.{key}": values for key, values in _NEUTRAL_SCALING.items()}}
    known |= dict.fromkeys(_EXPERT_KEYS.values()) if family.experts else {}
    known |= _DELTA if family.delta else {}
    stated = {key: value for key, value in metadata.data.items() if key.startswith(own)}
    refuse_unknown(Fields(stated, metadata.source), {own + key: values for key, values in known.items()})


def _vocabulary(file: GgufFile, own: str) -> int:
    if _EMBEDDING not in file.tensors:
        raise file.metadata.source.fault(f"it lacks {_EMBEDDING}: is it a whole model?")
    rows = file.tensors[_EMBEDDING].shape[0]
    if (stated := file.metadata.data.get(f"{own}vocab_size", rows)) != rows:
        raise file.metadata.fault(f"{own}vocab_size", f"is {shown(stated)}, but {_EMBEDDING} has {rows} rows")
    return rows


def _of_hybrid(metadata: Fields, own: str, head_dim: int) -> dict[str, Any]:
    """The layers without those that predict several tokens, which are counted at the end; the size of value heads,
    which is stated for all of them; and how much of a head is rotated."""
    layers = metadata.integer(f"{own}block_count", LAYERS)
    heads = metadata.integer(f"{own}{_DELTA_KEYS['linear_num_value_heads']}", HEADS)
    if (width := metadata.integer(f"{own}{_VALUES}", WIDTH)) % heads:
        raise metadata.fault(f"{own}{_VALUES}", f"is {width}, no multiple of {own}ssm.time_step_rank {heads}")
    return {
        "num_hidden_layers": layers - metadata.integer(f"{own}{_PREDICTING}", Between(0, layers - 1), 0),
        "linear_value_head_dim": width // heads,
        ROTARY_SHARE: metadata.integer(f"{own}{_ROTATED}", HEAD_DIM) / head_dim,
    }


def _stated_scaling(metadata: Fields, prefix: str) -> dict[str, Any]:
    """The entries of a config.json; none for plain rotary embedding."""
    kind = metadata.text(f"{prefix}type", "linear")  # what a factor without a type is
    if kind not in _SCALING_KEYS:
        raise metadata.fault(f"{prefix}type", f"is {shown(kind)}, which is not implemented; only linear and yarn are")
    factor = metadata.data.get(f"{prefix}factor", 0 if kind == "linear" else None)
    if kind == "none" or factor in (0, 1):  # 0 is llama.cpp's for none
        return {}
    keys = {name: f"{prefix}{key}" for name, key in _SCALING_KEYS[kind].items()}
    return {"rope_type": kind, **{name: metadata.data[key] for name, key in keys.items() if metadata.has(key)}}


def _scaling_of_divisors(file: GgufFile, dims: TransformerDims) -> RopeScaling | None:
    """Llama 3.1's scaling where the tensor holds what it computes, in float32; None where it is not there, or all ones.
    Raises CheckpointError for other divisors."""
    if DIVISORS not in file.tensors or ((divisors := file.read(DIVISORS)) == 1).all():
        return None
    largest = float(divisors.max())
    if divisors.shape == (dims.head_dim // 2,) and largest > 1:
        scaling = RopeScaling("llama3", largest, _LLAMA3_POSITIONS)
        plain, scaled = (inverse_frequencies(dims.head_dim, dims.rope_theta, s) for s in (None, scaling))
        if np.allclose(divisors, plain / scaled, rtol=1e-4, atol=0):
            return scaling
    problem = f"{DIVISORS} scales positions in another way than Llama 3.1 does"
    raise file.metadata.source.fault(f"{problem}, which is not implemented")


def stored_tensors(file: GgufFile, shapes: Shapes, dims: TransformerDims) -> dict[str, Shapes]:
    """By Hugging Face name: GGUF's names of the tensors that one is made of, one below the other, and their shapes
    there."""
    pieces = {name: _pieces(file, name, shape, dims) for name, shape in shapes.items()}
    names = file.names([asked for some in pieces.values() for asked in some], dims.num_layers)
    return {
        name: {names[asked]: tuple(size for size in shape if size > 1) or (1,) for asked, shape in some.items()}
        for name, some in pieces.items()
    }


def _pieces(file: GgufFile, name: str, shape: Shape, dims: TransformerDims) -> Shapes:
    """The same by the names that GGUF's are found by. The converter leaves out axes of 1."""
    if dims.delta and name.endswith("in_proj_qkvz.weight"):
        rows = {"qkv": dims.delta.channels, "z": shape[0] - dims.delta.channels}
        return {name.replace("qkvz", part): (count, *shape[1:]) for part, count in rows.items()}
    if len(shape) == 3 and name.endswith("experts.gate_up_proj"):
        if any(stored.endswith("ffn_gate_up_exps.weight") for stored in file.tensors):
            return {f"{name}.weight": shape}
        half = (shape[0], shape[1] // 2, shape[2])
        return {f"{name.replace('gate_up', part)}.weight": half for part in ("gate", "up")}
    return {name if name.endswith((".weight", ".bias", "A_log", "dt_bias")) else f"{name}.weight": shape}


def unused_tensors(file: GgufFile, dims: TransformerDims) -> set[str]:
    """Those of a hybrid's layers behind the last, which predict several tokens."""
    if dims.delta is None:
        return set()
    return {name for name in file.tensors if (at := _LAYER.match(name)) and int(at[1]) >= dims.num_layers}


def read_tensor(file: GgufFile, stored: Shapes, shape: Shape, dims: TransformerDims) -> NDArray[np.float32]:
    """A float32 copy of a tensor by what `stored_tensors` says of it, its rows in Hugging Face's order, a hybrid's in
    our form."""
    pieces = [_read(file, name, dims) for name in stored]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-2)
    return values if len(shape) > 2 else values.reshape(shape)


def _read(file: GgufFile, name: str, dims: TransformerDims) -> NDArray[np.float32]:
    values, part = file.read(name), name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if file.architecture not in _PAIRED:
        return from_gguf(part, values, dims)
    heads = {"attn_q": dims.num_heads, "attn_k": dims.num_kv_heads}.get(part)
    if heads is None:
        return values
    pairs = values.reshape(heads, dims.head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
