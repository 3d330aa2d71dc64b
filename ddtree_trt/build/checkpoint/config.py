"""Hugging Face's config.json, converted once into our own frozen records.

What the graphs cannot express is refused here by its name; no other module reads the foreign format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ddtree_trt.build.checkpoint.config_fields import refuse_unknown_fields
from ddtree_trt.build.checkpoint.dialect import LANGUAGE_MODEL, Dialect, architectures, dialect_of
from ddtree_trt.build.checkpoint.paths import GGUF
from ddtree_trt.build.checkpoint.quantization import Quantization, read_quantization
from ddtree_trt.build.checkpoint.rope import positions_with, read_scaling, read_theta
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models import decoder as bounds
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.experts import Experts, expert_contradiction
from ddtree_trt.models.families import EXPERT_NAMES, FAMILIES, QWEN3, Family, titles
from ddtree_trt.reading import Between, Fields, Source, read_object, read_value, shown

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_MASK_EMBEDDING = "mask_embedding.pt"  # of some drafters, in place of the mask token's

# Required by fused attention with rotary embedding; ONNX Runtime would refuse it only when the engine first runs.
_HEAD_DIM_MULTIPLE = 16
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # the second is transformers' name for the first


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one checkpoint."""

    dims: TransformerDims  # of the record that the kind of drafter has
    tied: bool  # the language-model head is the embedding
    stop_token_ids: tuple[int, ...]
    quantization: Quantization | None
    dialect: Dialect = LANGUAGE_MODEL


def read_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a target or drafter. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint at {directory}: there is no such directory")
    fields = Fields(_read_json(directory / CONFIG), _source(directory / CONFIG))
    dialect = dialect_of(fields)
    _refuse_mask_embedding(directory)
    decoder = dialect.decoder_fields(fields)
    family = _family(decoder, architectures(fields), dialect)
    refuse_unknown_fields(fields, family, dialect)
    quantization = read_quantization(directory, fields.data)
    dims = dialect.read_dims(fields, transformer_dims(decoder, family), family)
    if quantization and dims.experts:
        raise fields.source.fault("its experts are quantised, which is not implemented; use the model before that")
    return ModelConfig(
        dims=dims,
        tied=decoder.flag("tie_word_embeddings", False),
        stop_token_ids=_stop_token_ids(directory, decoder, dims.vocab_size),
        quantization=quantization,
        dialect=dialect,
    )


def _refuse_mask_embedding(directory: Path) -> None:
    if (directory / _MASK_EMBEDDING).is_file():
        raise CheckpointError(
            f"{directory} has {_MASK_EMBEDDING}, an embedding of the mask, which is not implemented; "
            "use a drafter without one"
        )


def _source(path: Path) -> Source:
    return Source(str(path), CheckpointError, "use a checkpoint as it was published, or fetch it again")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob(f"*{GGUF}"))
        hint = f"found {found[0]}: give the file itself" if found else "is this a Hugging Face checkpoint?"
        raise CheckpointError(f"{path.parent} has no {path.name}; {hint}")
    return read_object(path, _source(path))


def _family(decoder: Fields, classes: list[str], dialect: Dialect) -> Family:
    """The family of its layers. Raises CheckpointError for a model of none, and for a class with other parts around
    the layers; a checkpoint may leave its class out, and a decoder in an object of its own its type."""
    if not decoder.has("model_type") and not dialect.decoder:
        raise decoder.fault("model_type", "is missing: is this a Hugging Face checkpoint?")
    model_type = decoder.text("model_type", QWEN3.model_type)
    family = FAMILIES.get(model_type)
    mixed = "moe" in model_type or any(decoder.data.get(name) for name in _EXPERT_COUNTS)
    if mixed and (family is None or not family.experts):
        kinds = titles("and")
        raise decoder.fault(
            "model_type", f"is {shown(model_type)}: its mixture of experts is not supported, {kinds} models are"
        )
    if family is None:
        types = ", ".join(map(repr, FAMILIES))
        raise decoder.fault(
            "model_type", f"is {shown(model_type)}, only {titles('and')} models ({types}) are supported"
        )
    wanted = dialect.architectures or (family.architecture,)
    if other := [name for name in classes if name not in wanted and not dialect.decoder]:
        offered = f"of {dialect.title} {' and '.join(wanted)} is"
        raise decoder.fault("architectures", f"is {shown(other[0])}, which is not implemented; {offered}")
    return family


def transformer_dims(fields: Fields, family: Family) -> TransformerDims:
    """The dimensions that the entries of a config.json give a network of the family. Raises CheckpointError."""
    defaults = dict(family.defaults)
    if "num_key_value_heads" in fields.data:
        defaults.setdefault("num_key_value_heads", None)  # null means one per query head
    if (theta := read_theta(fields)) is not None:
        defaults["rope_theta"] = theta
    kinds, sizes = get_type_hints(TransformerDims, include_extras=True), {}
    for field, name in family.names.items():
        default = {"default": defaults[name]} if name in defaults else {}
        sizes[field] = fields.value(name, kinds[field], **default)
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    if heads % sizes["num_kv_heads"]:
        others = f"num_key_value_heads {sizes['num_kv_heads']}"
        raise fields.fault("num_attention_heads", f"{heads} is not a multiple of {others}")
    if sizes["head_dim"] is None and hidden % heads:
        raise fields.fault("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    sizes["head_dim"] = size = sizes["head_dim"] or hidden // heads
    if size % _HEAD_DIM_MULTIPLE:
        raise fields.fault("head_dim", f"is {size}, it must be a multiple of {_HEAD_DIM_MULTIPLE}")
    scaling = read_scaling(fields, sizes["rope_theta"], sizes["max_positions"])
    sizes["max_positions"] = positions = positions_with(scaling, sizes["max_positions"])
    if positions not in bounds.POSITIONS:
        raise fields.source.fault(f"its rotary scaling is made for {positions} positions, more than are supported")
    return TransformerDims(
        **sizes, **family.switches, rope_scaling=scaling, experts=_experts(fields, family) if family.experts else None
    )


def _experts(fields: Fields, family: Family) -> Experts:
    """The mixture of experts. Raises the fields' error for numbers that contradict each other."""
    first, second = (fields.data.get(name) for name in _EXPERT_COUNTS)
    if None not in (first, second) and first != second:
        raise fields.fault(_EXPERT_COUNTS[1], f"is {shown(second)}, but num_experts is {shown(first)}: which is it?")
    kinds = get_type_hints(Experts, include_extras=True)
    values = {}
    for field, name in EXPERT_NAMES.items():
        given = _EXPERT_COUNTS[1] if field == "count" and first is None and second is not None else name
        values[field] = fields.value(given, kinds[field], family.defaults[name])
    experts = Experts(**values)
    if problem := expert_contradiction(experts):
        raise fields.fault(EXPERT_NAMES["per_token"], f"is {experts.per_token}: {problem}")
    return experts


def _stop_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json's where it names any, as in transformers, else config.json's. Both are
    checked."""
    path = directory / GENERATION_CONFIG
    generation = Fields(_read_json(path) if path.is_file() else {}, _source(path))
    token, found = Annotated[int, Between(0, vocab_size - 1)], []
    for each in (generation, fields):
        if each.has("eos_token_id"):
            given = each.data["eos_token_id"]
            ids = given if isinstance(given, list) else [given]
            found.append(tuple(dict.fromkeys(read_value(token, i, each.source, "eos_token_id") for i in ids)))
            if len(found[-1]) == vocab_size:
                raise each.fault(
                    "eos_token_id", f"names the whole vocabulary of {vocab_size}: no text could be written"
                )
    return found[0] if found else ()
