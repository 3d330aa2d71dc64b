"""The record of a dialect, and the reading of values that a dialect may state in more than one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Fields, shown

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
    architectures: tuple[str, ...]  # the classes it has in config.json; () for that of its decoder's family
    fields: Known  # of the file, beside those of a decoder where no object of its own states that
    read_dims: ReadDims
    sections: Mapping[str, Known] = field(default_factory=dict)  # objects within the file
    decoder: str | None = None  # the object that states the decoder; None: the file does
    settle: Settle = lambda dims, stored: dims
    unused: tuple[str, ...] = ()  # beginnings of the names of tensors that drafting does not need
    renamed: Mapping[str, str] = field(default_factory=dict)  # beginning of a tensor's name → ours in its place

    def our_name(self, name: str) -> str:
        """Our name of a tensor of the checkpoint."""
        old = next((old for old in self.renamed if name.startswith(old)), "")
        return self.renamed.get(old, "") + name[len(old) :]

    def decoder_fields(self, fields: Fields) -> Fields:
        """The object that states the decoder."""
        return fields.section(self.decoder) if self.decoder else fields


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
