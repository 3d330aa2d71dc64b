"""Hugging Face's config.json, converted once into our own frozen records.

What the graphs cannot express is refused here by its name; no other module reads the foreign format. Rotary embedding
is published in two spellings: transformers 5 has base and scaling in `rope_parameters`, older versions have
`rope_theta` beside an object `rope_scaling`, whose type is `rope_type` or, older still, `type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ddtree_trt.build.checkpoint.dialect import (
    LANGUAGE_MODEL,
    Dialect,
    Known,
    architectures,
    attention_layers,
    dialect_of,
    refuse_unknown,
    stated,
)
from ddtree_trt.build.checkpoint.quantization import Quantization, read_quantization
from ddtree_trt.build.sources import GGUF
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models import decoder as bounds
from ddtree_trt.models import families
from ddtree_trt.models.decoder import Experts, TransformerDims
from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.models.families import FAMILIES, ROTARY_SHARE, SHARED_EXPERT, Family, titles
from ddtree_trt.models.rope_scaling import FACTOR, ROPE_BASE, SCALINGS, RopeScaling, yarn_attention_factor
from ddtree_trt.reading import Between, Fields, Source, read_object, read_record, read_value, shown

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_MASK_EMBEDDING = "mask_embedding.pt"  # of some drafters, in place of the mask token's

# Required by fused attention with rotary embedding; ONNX Runtime would refuse it only when the engine first runs.
_HEAD_DIM_MULTIPLE = 16
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # the second is transformers' name for the first

_ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
_ROPE_TYPES = ("rope_type", "type")
_ROPE_POSITIONS = "original_max_position_embeddings"
_MSCALE = ("mscale", "mscale_all_dim")  # a YaRN scaling may give these instead of its attention factor
_ROPE_OPTIONAL = (_ROPE_POSITIONS, "beta_fast", "beta_slow", "truncate", "attention_factor")
_ROPE_KNOWN: Known = {**dict.fromkeys(_ROPE_TYPES, ("default", *SCALINGS)), ROTARY_SHARE: (1,), "rope_theta": None}
# Of a text all three positions of a vision-language model's rotary embedding are the same.
_ROPE_OF_HYBRIDS: Known = {**_ROPE_KNOWN, ROTARY_SHARE: None, "mrope_section": None, "mrope_interleaved": None}


@dataclass(frozen=True)
class ModelConfig:
    dims: TransformerDims  # of the record that the kind of drafter has
    tied: bool  # the language-model head is the embedding
    stop_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    dialect: Dialect = LANGUAGE_MODEL


def read_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a target or drafter. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint at {directory}: there is no such directory")
    if not (directory / CONFIG).is_file():
        found = sorted(p.name for p in directory.glob(f"*{GGUF}"))
        hint = f"found {found[0]}: give the file itself" if found else "is this a Hugging Face checkpoint?"
        raise CheckpointError(f"{directory} has no {CONFIG}; {hint}")
    fields = _read(directory / CONFIG)
    dialect = dialect_of(fields)
    if (directory / _MASK_EMBEDDING).is_file():
        problem = f"{directory} has {_MASK_EMBEDDING}, an embedding of the mask, which is not implemented"
        raise CheckpointError(f"{problem}; use a drafter without one")
    decoder = fields.section(dialect.decoder) if dialect.decoder else fields
    family = _family(decoder, architectures(fields), dialect)
    dialect.refuse_unknown(fields, family)
    quantization = read_quantization(directory, fields)
    dims = dialect.read_dims(fields, transformer_dims(decoder, family), family)
    if quantization and (dims.experts or dims.delta):
        which = "experts are" if dims.experts else "delta-net layers are"
        raise fields.source.fault(f"its {which} quantised, which is not implemented; use the model before that")
    places = [decoder, fields] if dialect.skipped else [decoder]
    return ModelConfig(
        dims=dims,
        tied=stated("tie_word_embeddings", bool, *places) or False,
        stop_token_ids=_stop_token_ids(directory, decoder, dims.vocab_size),
        quantization=quantization,
        dialect=dialect,
    )


def _read(path: Path) -> Fields:
    source = Source(str(path), CheckpointError, "use a checkpoint as it was published, or fetch it again")
    return Fields(read_object(path, source) if path.is_file() else {}, source)


def _family(decoder: Fields, classes: list[str], dialect: Dialect) -> Family:
    """The family of its layers. Raises CheckpointError for a model of none, and for a class with other parts around
    the layers; a checkpoint may leave its class out, and a decoder in an object of its own its type."""
    if not decoder.has("model_type") and not dialect.speculators:
        raise decoder.fault("model_type", "is missing: is this a Hugging Face checkpoint?")
    model_type = decoder.text("model_type", families.QWEN3.model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        known = f"only {titles('and')} models ({', '.join(map(repr, FAMILIES))}) are supported"
        raise decoder.fault("model_type", f"is {shown(model_type)}, {known}")
    whole = family.with_vision if dialect.skipped else family.architecture
    if not whole:
        raise decoder.fault("model_type", f"is {shown(model_type)}, whose vision-language models are not implemented")
    wanted = dialect.architectures or (whole,)
    if other := [name for name in classes if name not in wanted and not dialect.speculators]:
        offered = f"of {dialect.title} {' and '.join(wanted)} is"
        raise decoder.fault("architectures", f"is {shown(other[0])}, which is not implemented; {offered}")
    return family


def transformer_dims(fields: Fields, family: Family) -> TransformerDims:
    """The dimensions that the entries of a config.json give a network of the family. Raises CheckpointError."""
    defaults = dict(family.defaults)
    if "num_key_value_heads" in fields.data:
        defaults["num_key_value_heads"] = None  # null means one per query head
    places = (*map(fields.section, _ROPE_SECTIONS), fields)
    if (theta := stated("rope_theta", Annotated[float, ROPE_BASE], *places)) is not None:
        defaults["rope_theta"] = theta
    kinds, sizes = get_type_hints(TransformerDims, include_extras=True), {}
    for field, name in family.names.items():
        default = {"default": defaults[name]} if name in defaults else {}
        sizes[field] = fields.value(name, kinds[field], **default)
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    if sizes["head_dim"] is None and hidden % heads:
        raise fields.fault("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    sizes["head_dim"] = size = sizes["head_dim"] or hidden // heads
    _check_head(fields, "head_dim", size)
    known = _ROPE_OF_HYBRIDS if family.delta else _ROPE_KNOWN
    scaling = _rope_scaling(fields, sizes["max_positions"], known)
    if scaling is not None and scaling.rope_type == "yarn":
        # Often left as it was where YaRN is switched on, which is made for `factor` times the positions of training.
        scaled = int(scaling.factor * scaling.original_max_position_embeddings)
        sizes["max_positions"] = max(sizes["max_positions"], scaled)
        if scaled > bounds.POSITIONS.highest:
            raise fields.source.fault(f"its rotary scaling is made for {scaled} positions, more than are supported")
    if family.delta:
        share: Any = stated(ROTARY_SHARE, Annotated[float, Between(0, 1)], *places)
        share = family.defaults[ROTARY_SHARE] if share is None else share
        sizes["rotary_dim"] = rotated = int(size * share)
        if rotated < 2 or rotated % 2:
            words = f"rotates {rotated} of {size} elements, no even number"
            raise fields.source.fault(f"{ROTARY_SHARE} {share} {words}")
        sizes["delta"] = _delta_net(fields, family, sizes["num_layers"])
    experts = _experts(fields, family) if family.experts else None
    dims = TransformerDims(**sizes | family.switches, rope_scaling=scaling, experts=experts)
    if problem := dims.contradiction():
        raise fields.source.fault(problem)
    return dims


def _named(fields: Fields, family: Family, record: type, names: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a record, each by its name in config.json; one that is left out has the family's default."""
    kinds = get_type_hints(record, include_extras=True)
    return {field: fields.value(name, kinds[field], family.defaults[name]) for field, name in names.items()}


def _check_head(fields: Fields, name: str, size: int) -> None:
    if size % _HEAD_DIM_MULTIPLE:
        raise fields.fault(name, f"is {size}, it must be a multiple of {_HEAD_DIM_MULTIPLE}")


def _delta_net(fields: Fields, family: Family, layers: int) -> DeltaNet:
    """A hybrid's layers without attention. Raises the fields' error."""
    values = _named(fields, family, DeltaNet, families.DELTA_NAMES)
    for field in ("key_dim", "value_dim"):
        _check_head(fields, families.DELTA_NAMES[field], values[field])
    interval = fields.value(families.INTERVAL, Annotated[int, bounds.LAYERS], family.defaults[families.INTERVAL])
    attention = attention_layers(fields, layers, interval, families.LINEAR_ATTENTION)
    return DeltaNet(**values, attention_layers=attention, interleaved=family.interleaved)


def _experts(fields: Fields, family: Family) -> Experts:
    """The mixture of experts. Raises the fields' error."""
    first, second = (fields.data.get(name) for name in _EXPERT_COUNTS)
    if None not in (first, second) and first != second:
        raise fields.fault(_EXPERT_COUNTS[1], f"is {shown(second)}, but num_experts is {shown(first)}: which is it?")
    names = dict(families.EXPERT_NAMES)
    if SHARED_EXPERT in family.defaults:
        names["shared"] = SHARED_EXPERT
    values = _named(fields, family, Experts, names)
    if first is None and second is not None:
        values["count"] = fields.integer(_EXPERT_COUNTS[1], bounds.EXPERTS)
    return Experts(**values, stacked=family.stacked)


def _stop_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json's where it names any, as in transformers, else config.json's."""
    token, found = Annotated[int, Between(0, vocab_size - 1)], []
    for each in (_read(directory / GENERATION_CONFIG), fields):
        if each.has("eos_token_id"):
            given = each.data["eos_token_id"]
            ids = given if isinstance(given, list) else [given]
            found.append(tuple(dict.fromkeys(read_value(token, i, each.source, "eos_token_id") for i in ids)))
            if len(found[-1]) == vocab_size:
                problem = f"names the whole vocabulary of {vocab_size}: no text could be written"
                raise each.fault("eos_token_id", problem)
    return found[0] if found else ()


def _rope_scaling(fields: Fields, max_positions: int, known: Known) -> RopeScaling | None:
    """The scaling; None for plain rotary embedding. Raises the fields' error for a type or a field that is not
    implemented."""
    sections = [section for name in _ROPE_SECTIONS if (section := fields.section(name)).data]
    found = [_scaling_of(section, max_positions, known) for section in sections]
    if len(set(found)) > 1:
        raise fields.source.fault(f"{' and '.join(_ROPE_SECTIONS)} state different scalings: which is it?")
    return next(iter(found), None)


def _scaling_of(section: Fields, max_positions: int, known: Known) -> RopeScaling | None:
    """One object's scaling; `known` are the fields of every type."""
    refuse_unknown(section, {**dict.fromkeys(section.data), **known})  # the type first: it says more
    types = {name: section.text(name) for name in _ROPE_TYPES if section.has(name)}
    if len(set(types.values())) > 1:
        raise section.fault("type", f"is {shown(types['type'])}, rope_type {shown(types['rope_type'])}: which is it?")
    kind: Any = next(iter(types.values()), "default")
    if kind == "default":
        refuse_unknown(section, {**known, "factor": (1,)})
        return None
    used = SCALINGS[kind]
    also = _MSCALE if kind == "yarn" else ()
    refuse_unknown(section, {**known, **dict.fromkeys((*used, *also))})
    given: dict[str, Any] = {name: section.data[name] for name in used if section.has(name)}
    if missing := [name for name in used if name not in given and name not in _ROPE_OPTIONAL]:
        raise section.source.fault(f"{section.path} has no {missing[0]}")
    if _ROPE_POSITIONS in used:
        given.setdefault(_ROPE_POSITIONS, max_positions)
    if kind == "yarn" and "attention_factor" not in given:
        scales = (section.optional(name, Annotated[float, Between(0, 1e3)]) for name in _MSCALE)
        given["attention_factor"] = yarn_attention_factor(section.value("factor", Annotated[float, FACTOR]), *scales)
    return read_record(RopeScaling, {"rope_type": kind, **given}, section.source, section.path)
