"""Hugging Face's config.json, converted once into our own frozen records.

What the graphs cannot express is refused here by its name; nothing foreign gets past this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ddtree_trt.artifact import dimensions as bounds
from ddtree_trt.artifact.manifest import DrafterDims, TransformerDims
from ddtree_trt.build.checkpoint.config_fields import refuse_others
from ddtree_trt.build.checkpoint.quantization import Quantization, read_quantization
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Between, Fields, Source, read_object, read_value, shown

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# The only classes whose layers the graphs are; a checkpoint may leave its class out.
_LANGUAGE_MODEL, _DFLASH = "Qwen3ForCausalLM", "DFlashDraftModel"

# What fused attention with rotary embedding asks for; ONNX Runtime would say so only when the engine first runs.
_HEAD_DIM_MULTIPLE = 16
_LONGEST_WINDOW = 1 << 30


@dataclass(frozen=True)
class ModelConfig:
    """What the configuration files of one checkpoint say."""

    dims: TransformerDims  # of the record that the kind of drafter has
    tied: bool  # the language-model head is the embedding
    stop_token_ids: tuple[int, ...]
    quantization: Quantization | None


def read_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a target or drafter. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint at {directory}: there is no such directory")
    fields = Fields(_read_json(directory / CONFIG), _source(directory / CONFIG))
    is_dflash = _check_kind(fields)
    refuse_others(fields, dflash=is_dflash)
    quantization = read_quantization(directory, fields.data)
    dims = _transformer_dims(fields)
    _check_layer_types(fields, dims.num_layers)
    if is_dflash:
        dims = _drafter_dims(fields, dims)
    return ModelConfig(
        dims=dims,
        tied=fields.flag("tie_word_embeddings", False),
        stop_token_ids=_stop_token_ids(directory, fields, dims.vocab_size),
        quantization=quantization,
    )


def _source(path: Path) -> Source:
    return Source(str(path), CheckpointError, "use a checkpoint as it was published, or fetch it again")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; is this a Hugging Face checkpoint?")
    return read_object(path, _source(path))


def _check_kind(fields: Fields) -> bool:
    """Whether it is a DFlash drafter. Raises CheckpointError for what is neither that nor a dense Qwen3 model."""
    architectures = fields.optional("architectures", list[str]) or []
    dflash = fields.has("dflash_config") or _DFLASH in architectures
    if not fields.has("model_type"):
        raise fields.fault("model_type", "is missing: is this a Hugging Face checkpoint?")
    model_type = fields.text("model_type")
    if "moe" in model_type or any(fields.data.get(name) for name in ("num_experts", "num_local_experts")):
        raise fields.fault(
            "model_type",
            f"is {shown(model_type)}: mixture-of-experts models are not supported, dense Qwen3 models are",
        )
    if model_type != "qwen3":
        raise fields.fault("model_type", f"is {shown(model_type)}, only dense Qwen3 models ('qwen3') are supported")
    wanted = _DFLASH if dflash else _LANGUAGE_MODEL
    if other := [name for name in architectures if name != wanted]:
        kind = "drafters with a dflash_config" if dflash else "other checkpoints"
        raise fields.fault("architectures", f"is {shown(other[0])}, which is not implemented; of {kind} {wanted} is")
    return dflash


def _check_layer_types(fields: Fields, layers: int) -> None:
    """Every layer must attend to the whole sequence; where config.json lists none, by transformers' derivation."""
    windowed = fields.flag("use_sliding_window", False)
    # 0 is written for none where none is used.
    within = Between(1 if windowed else 0, _LONGEST_WINDOW)
    no_window = fields.optional("sliding_window", Annotated[int, within]) is None and "sliding_window" in fields.data
    first = fields.integer("max_window_layers", Between(0, bounds.LAYERS.highest), 28)
    kinds = fields.optional("layer_types", list[str])
    if kinds is None:
        kinds = ["sliding_attention"] if windowed and not no_window and first < layers else []
    elif len(kinds) != layers:
        raise fields.fault("layer_types", f"has {len(kinds)} entries for num_hidden_layers {layers}")
    for kind in kinds:
        if kind != "full_attention":
            raise fields.fault(
                "layer_types", f"is {shown(kind)}, which is not implemented: every layer must be 'full_attention'"
            )


def _rope_theta(fields: Fields) -> float:
    """The rotary base, from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    places = (fields.section("rope_parameters"), fields.section("rope_scaling"), fields)
    given = [part for part in places if part.has("rope_theta")]
    found = {part.place("rope_theta"): part.number("rope_theta", bounds.ROPE_BASE) for part in given}
    if len(set(found.values())) > 1:
        values = " and ".join(f"{name} {value:g}" for name, value in found.items())
        raise fields.source.fault(f"there are two values, {values}: which is it?")
    # The rest are the defaults of transformers' Qwen3Config for fields that are not in the file.
    return next(iter(found.values()), 10000.0)


def _transformer_dims(fields: Fields) -> TransformerDims:
    heads = fields.integer("num_attention_heads", bounds.HEADS)
    # null means one per query head
    one_each = "num_key_value_heads" in fields.data and not fields.has("num_key_value_heads")
    kv_heads = heads if one_each else fields.integer("num_key_value_heads", bounds.HEADS)
    if heads % kv_heads:
        raise fields.fault("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.integer("head_dim", bounds.HEAD_DIM, 128)
    if head_dim % _HEAD_DIM_MULTIPLE:
        raise fields.fault("head_dim", f"is {head_dim}, it must be a multiple of {_HEAD_DIM_MULTIPLE}")
    return TransformerDims(
        vocab_size=fields.integer("vocab_size", bounds.VOCABULARY),
        hidden_size=fields.integer("hidden_size", bounds.WIDTH),
        num_layers=fields.integer("num_hidden_layers", bounds.LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", bounds.WIDTH),
        rms_norm_eps=fields.number("rms_norm_eps", bounds.EPSILON, 1e-6),
        rope_theta=_rope_theta(fields),
        max_positions=fields.integer("max_position_embeddings", bounds.POSITIONS, 32768),
    )


def default_tap_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers a published DFlash drafter taps when its config names none.

    One per drafter layer, evenly spread from the second layer to the third from last; halves round to even.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))


def _drafter_dims(fields: Fields, dims: TransformerDims) -> DrafterDims:
    section = fields.section("dflash_config")
    num_target_layers = fields.integer("num_target_layers", bounds.LAYERS)
    taps = section.optional("target_layer_ids", list[Annotated[int, bounds.LAYER]])
    if taps is None:
        taps = list(default_tap_layers(num_target_layers, dims.num_layers))
    if not taps or len(taps) > bounds.LAYERS.highest:
        raise section.fault("target_layer_ids", f"has {len(taps)} entries, it must name the target layers to tap")
    return DrafterDims(
        **vars(dims),
        block_size=_block_size(fields, section),
        mask_token_id=section.integer("mask_token_id", bounds.TOKEN),
        tap_layers=tuple(taps),
        num_target_layers=num_target_layers,
    )


def _block_size(fields: Fields, section: Fields) -> int:
    """Beside `dflash_config` in z-lab's first checkpoints, inside it in others."""
    block = Annotated[int, bounds.BLOCK]
    inner = section.optional("block_size", block)
    if inner is None:
        return fields.integer("block_size", bounds.BLOCK)
    outer = fields.optional("block_size", block)
    if outer not in (None, inner):
        raise fields.fault("block_size", f"is {outer}, but {inner} in dflash_config: which is it?")
    return int(inner)


def _stop_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json's where it names any, as in transformers, else config.json's."""
    path = directory / GENERATION_CONFIG
    generation = Fields(_read_json(path) if path.is_file() else {}, _source(path))
    chosen = generation if generation.has("eos_token_id") else fields
    if not chosen.has("eos_token_id"):
        return ()
    found = chosen.data["eos_token_id"]
    token = Annotated[int, Between(0, vocab_size - 1)]
    ids = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(read_value(token, i, chosen.source, "eos_token_id") for i in ids))
