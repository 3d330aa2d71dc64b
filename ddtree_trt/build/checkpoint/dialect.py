"""Dialects of config.json: how publishers write it and name tensors, and which of them a file is.

Every dialect is read into the same records (`models/`, `drafters/`). Those of drafters are in the packages of their
kinds; no other room knows a foreign field of a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_trt.build.checkpoint.layer_types import refuse_windows
from ddtree_trt.drafters.registry import KINDS
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import FAMILIES, Family
from ddtree_trt.reading import Fields, shown

# The library `speculators` writes the drafter's type, and its decoder in an object of its own.
SPECULATORS_TYPE, SPECULATORS_DECODER = "speculators_model_type", "transformer_layer_config"

# (config.json, dimensions of the decoder that it states, the decoder's family) → dimensions of the network.
ReadDims = Callable[[Fields, TransformerDims, Family], TransformerDims]
# (dimensions as config.json has them, names of the stored tensors) → the dimensions of these tensors.
Settle = Callable[[Any, Collection[str]], TransformerDims]


@dataclass(frozen=True)
class Known:
    """The fields of one object that are known; every other one is refused by its name."""

    read: frozenset[str] = frozenset()  # read, or no number of the model depends on them
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # field → the values that change nothing


@dataclass(frozen=True)
class Dialect:
    """How one family of publishers writes config.json and names tensors."""

    title: str  # in messages: "drafters with a dflash_config"
    fields: Known  # of the file, beside those of a decoder where no object of its own states that
    read_dims: ReadDims
    architectures: tuple[str, ...] = ()  # the classes it has in config.json; () for that of its decoder's family
    mark: str = ""  # the field that tells it from others where the class does not
    speculators: str = ""  # its type, where it is a layout of the library `speculators`
    sections: Mapping[str, Known] = field(default_factory=dict)  # objects within the file
    settle: Settle = lambda dims, stored: dims
    unused: tuple[str, ...] = ()  # beginnings of the names of tensors that drafting does not need
    renamed: Mapping[str, str] = field(default_factory=dict)  # beginning of a tensor's name → ours in its place

    @property
    def decoder(self) -> str | None:
        """The object that states the decoder; None: the file does."""
        return SPECULATORS_DECODER if self.speculators else None

    def our_name(self, name: str) -> str:
        """Our name of a tensor of the checkpoint."""
        old = next((old for old in self.renamed if name.startswith(old)), "")
        return self.renamed.get(old, "") + name[len(old) :]

    def decoder_fields(self, fields: Fields) -> Fields:
        """The object that states the decoder."""
        return fields.section(self.decoder) if self.decoder else fields


def _language_model_dims(fields: Fields, dims: TransformerDims, family: Family) -> TransformerDims:
    refuse_windows(fields, family, dims.num_layers)
    return dims


# Targets, and drafters that are one.
LANGUAGE_MODEL = Dialect(
    title="other checkpoints",
    fields=Known(neutral={"is_causal": (True,), "is_decoder": (True, False)}),
    read_dims=_language_model_dims,
)


def _dialects() -> Iterator[Dialect]:
    """Those of drafters, in the order of their kinds."""
    for kind in KINDS.values():
        if "dialects" in kind.halves:
            yield from kind.load("dialects")


def architectures(fields: Fields) -> list[str]:
    """The classes that the file names; it may leave them out."""
    return fields.optional("architectures", list[str]) or []


def dialect_of(fields: Fields) -> Dialect:
    """By the type of speculators' layout, else by the class, else by the mark. What is none of these is a language
    model, whose allow-list refuses every other drafter's fields."""
    if fields.has(SPECULATORS_TYPE) or fields.has(SPECULATORS_DECODER):
        types = {dialect.speculators: dialect for dialect in _dialects() if dialect.speculators}
        if (kind := fields.text(SPECULATORS_TYPE)) not in types:
            problem = f"is {shown(kind)}, which is not implemented; {' and '.join(types)} are"
            raise fields.fault(SPECULATORS_TYPE, problem)
        return types[kind]
    decoders = {family.architecture for family in FAMILIES.values()}
    named = {name for name in architectures(fields) if name not in decoders}
    ways: tuple[Callable[[Dialect], bool], ...] = (
        lambda dialect: not named.isdisjoint(dialect.architectures),
        lambda dialect: bool(dialect.mark) and fields.has(dialect.mark),
    )
    return next((dialect for way in ways for dialect in _dialects() if way(dialect)), LANGUAGE_MODEL)


def words(text: str) -> frozenset[str]:
    """Names that are separated by spaces."""
    return frozenset(text.split())


def stated(name: str, kind: Any, *places: Fields) -> Any:
    """The value of a field that several objects may have; None where none has it. Raises the fields' error where two
    objects differ."""
    found = [(place, place.value(name, kind)) for place in places if place.has(name)]
    for place, value in found[1:]:
        if value != found[0][1]:
            first, *_ = found
            problem = f"is {shown(first[1])}, but {shown(value)} in {place.path or 'the file'}: which is it?"
            raise first[0].fault(name, problem)
    return found[0][1] if found else None


def required(name: str, kind: Any, *places: Fields) -> Any:
    """`stated` of a field that must be there."""
    value = stated(name, kind, *places)
    return places[0].value(name, kind) if value is None else value
