"""Hugging Face's config.json, converted once into our own frozen records.

What the graphs cannot express is refused here by its name; nothing foreign gets past this file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import DrafterDims, TransformerDims
from ddtree_trt.build.quantization import Quantization, read_quantization
from ddtree_trt.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# What transformers' Qwen3Config takes for a field that is not in the file.
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0}

# What fused attention with rotary embedding asks for; ONNX Runtime would say so only when the engine first runs.
_HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True)
class ModelConfig:
    """What the configuration files of one checkpoint say."""

    dims: TransformerDims  # DrafterDims for a DFlash drafter
    tied: bool  # the language-model head is the embedding
    stop_token_ids: tuple[int, ...]
    quantization: Quantization | None

    @property
    def is_dflash(self) -> bool:
        return isinstance(self.dims, DrafterDims)


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the field."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.data.get(name, _DEFAULTS.get(name))
        if value is None:
            raise CheckpointError(f"{self.where} has no {name}")
        if type(value) is not int or value < minimum:
            raise CheckpointError(f"{self.where}: {name} must be an integer of at least {minimum}, found {value!r}")
        return value

    def positive(self, name: str) -> float:
        value = self.data.get(name, _DEFAULTS.get(name))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.where}: {name} must be a positive number, found {value!r}")
        return float(value)

    def section(self, name: str) -> _Fields:
        value = self.data.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} must be an object, found {value!r}")
        return _Fields(value, f"{self.where}: {name}")

    def refuse(self, name: str, found: object, supported: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {found!r}, which is not supported; {supported}")


def read_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a target or drafter. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint at {directory}: there is no such directory")
    fields = _Fields(_read_json(directory / CONFIG), str(directory / CONFIG))
    is_dflash = "dflash_config" in fields.data or "DFlashDraftModel" in (fields.data.get("architectures") or [])
    _refuse_unsupported(fields)
    quantization = read_quantization(directory, fields.data)
    dims = _transformer_dims(fields)
    if is_dflash:
        dims = _drafter_dims(fields, dims)
    return ModelConfig(
        dims=dims,
        tied=bool(fields.data.get("tie_word_embeddings", False)),
        stop_token_ids=_stop_token_ids(directory, fields, dims.vocab_size),
        quantization=quantization,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; is this a Hugging Face checkpoint?")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object; fetch the checkpoint again")
    return data


def _refuse_unsupported(fields: _Fields) -> None:
    data = fields.data
    model_type = data.get("model_type")
    if data.get("num_experts") or data.get("num_local_experts") or "moe" in str(model_type):
        raise fields.refuse("model_type", model_type, "mixture-of-experts models are not; use a dense Qwen3 model")
    if model_type != "qwen3":
        raise fields.refuse("model_type", model_type, "use a dense Qwen3 model ('qwen3')")
    if data.get("attention_bias"):
        raise fields.refuse("attention_bias", data["attention_bias"], "projections must have no bias")
    if data.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", data["hidden_act"], "use 'silu'")
    for kind in _layer_types(fields):
        if kind != "full_attention":
            raise fields.refuse("layer_types", kind, "every layer must attend to the whole sequence ('full_attention')")


def _layer_types(fields: _Fields) -> list[str]:
    """Kinds of attention by layer, derived as transformers does where config.json does not list them."""
    data, layers = fields.data, fields.integer("num_hidden_layers")
    if data.get("layer_types") is not None:
        return list(data["layer_types"])
    windowed = data.get("use_sliding_window") and data.get("sliding_window", 4096) is not None
    first = data.get("max_window_layers", 28) if windowed else layers
    return ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(0, layers - first)


def _rope_theta(fields: _Fields) -> float:
    """The rotary base, from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    for section in (new, old):
        kind = section.data.get("rope_type", section.data.get("type", "default"))
        if kind != "default":
            raise section.refuse("rope_type", kind, "use a checkpoint with the default rotary embedding")
        if section.data.get("partial_rotary_factor", 1) != 1:
            factor = section.data["partial_rotary_factor"]
            raise section.refuse("partial_rotary_factor", factor, "the whole head must be rotated")
    if "rope_theta" not in new.data:
        return fields.positive("rope_theta")
    theta = new.positive("rope_theta")
    if fields.data.get("rope_theta", theta) != theta:
        raise CheckpointError(
            f"{fields.where}: rope_theta is {fields.data['rope_theta']}, but {theta} in rope_parameters: which is it?"
        )
    return theta


def _transformer_dims(fields: _Fields) -> TransformerDims:
    heads = fields.integer("num_attention_heads")
    explicit_kv = fields.data.get("num_key_value_heads", 0) is not None  # null means one per query head
    kv_heads = fields.integer("num_key_value_heads") if explicit_kv else heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.integer("head_dim")
    if head_dim % _HEAD_DIM_MULTIPLE:
        raise fields.refuse("head_dim", head_dim, f"it must be a multiple of {_HEAD_DIM_MULTIPLE}")
    return TransformerDims(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        max_positions=fields.integer("max_position_embeddings"),
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


def _drafter_dims(fields: _Fields, dims: TransformerDims) -> DrafterDims:
    section = fields.section("dflash_config")
    num_target_layers = fields.integer("num_target_layers")
    taps = section.data.get("target_layer_ids")
    if taps is None:
        taps = default_tap_layers(num_target_layers, dims.num_layers)
    elif not isinstance(taps, list) or not taps or any(type(i) is not int for i in taps):
        raise CheckpointError(f"{section.where}: target_layer_ids must be a list of layer numbers, found {taps!r}")
    return DrafterDims(
        **vars(dims),
        block_size=fields.integer("block_size", minimum=2),
        mask_token_id=section.integer("mask_token_id", minimum=0),
        tap_layers=tuple(taps),
        num_target_layers=num_target_layers,
    )


def _stop_token_ids(directory: Path, fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json's where it names any, as in transformers, else config.json's."""
    path = directory / GENERATION_CONFIG
    generation = _read_json(path) if path.is_file() else {}
    found = generation.get("eos_token_id")
    where = path
    if found is None:
        found, where = fields.data.get("eos_token_id"), directory / CONFIG
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(f"{where}: eos_token_id {token!r} is not a token below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))
