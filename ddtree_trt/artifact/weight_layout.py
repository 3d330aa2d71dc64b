"""The torch backend's weight file: which tensors it holds, under which names and in which order.

Each is one part of an architecture: tensors of a checkpoint joined along their first axis, so that joining is writing
one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.models.decoder import (
    Layer,
    Part,
    TransformerDims,
    decoder_layers,
    embedding,
    final_norm,
    head,
)
from ddtree_trt.models.drafters import dflash, eagle3
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims
from ddtree_trt.models.drafters.kinds import KindName, kind_of

Network = Literal["target", "drafter"]
TARGET, DRAFTER = "target.", "drafter."  # prefixes


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    network: Network  # whose checkpoint the sources are in
    sources: tuple[str, ...]  # Hugging Face names, in order
    integers: bool = False  # int32 instead of the precision's type


def stored_weights(
    target: TransformerDims, drafter: TransformerDims, *, target_tied: bool, drafter_tied: bool
) -> list[StoredWeight]:
    """All tensors of the file in order. A network without `head` uses its embedding; DFlash has the
    tables that are its own."""
    own = _DRAFTERS[kind_of(drafter).name](drafter, drafter_tied)
    return [*_language_model(TARGET, "target", target, target_tied), *own]


def _language_model(prefix: str, network: Network, dims: TransformerDims, tied: bool) -> Iterator[StoredWeight]:
    yield _stored(prefix, network, embedding(dims))
    if not tied:
        yield _stored(prefix, network, head(dims))
    for i, layer in enumerate(decoder_layers(dims)):
        for part in (*_projected(layer), *_other_parts(layer)):
            yield _stored(f"{prefix}layers.{i}.", network, part)
    yield _stored(prefix, network, final_norm(dims))


def _autoregressive(dims: TransformerDims, tied: bool) -> Iterator[StoredWeight]:
    return _language_model(DRAFTER, "drafter", dims, tied)


def _dflash(dims: DrafterDims, tied: bool) -> Iterator[StoredWeight]:
    layers = dflash.drafter_layers(dims)
    yield _stored(DRAFTER, "drafter", dflash.fc(dims))
    yield _stored(DRAFTER, "drafter", dflash.context_norm(dims))
    # One tensor over all layers: the context's keys and values of every layer come out of one product.
    for parts in zip(*map(_projected, layers), strict=True):
        sources = tuple(source for part in parts for source in part.sources)
        yield StoredWeight(f"{DRAFTER}{parts[0].name}", (dims.num_layers, *parts[0].shape), "drafter", sources)
    for i, layer in enumerate(layers):
        for part in _other_parts(layer):
            yield _stored(f"{DRAFTER}layers.{i}.", "drafter", part)
        for convolution in dflash.layer_convolutions(dims, i).values():
            for part in convolution:
                yield _stored(f"{DRAFTER}layers.{i}.", "drafter", part)
    yield _stored(DRAFTER, "drafter", final_norm(dims, dflash.BODY))
    for part in dflash.own_tables(dims):
        yield _stored(DRAFTER, "drafter", part)
    if (head := dims.pair_head) is not None:
        for part in head.parts:
            yield _stored(DRAFTER, "drafter", part)


def _eagle3(dims: Eagle3Dims, tied: bool) -> Iterator[StoredWeight]:
    layer = eagle3.eagle_layer(dims)
    for part in (*eagle3.own_tables(dims), eagle3.fc(dims), eagle3.state_norm(dims)):
        yield _stored(DRAFTER, "drafter", part)
    for part in (*_projected(layer), *_other_parts(layer)):
        yield _stored(f"{DRAFTER}layers.0.", "drafter", part)
    yield _stored(DRAFTER, "drafter", final_norm(dims, eagle3.BODY))
    if dims.draft_vocab_size is not None:
        yield _stored(DRAFTER, "drafter", eagle3.to_target(dims))


# A drafter's own weights, by its kind: (dimensions, whether its head is its embedding) → weights.
_DRAFTERS: Mapping[KindName, Callable[[Any, bool], Iterator[StoredWeight]]] = {
    "dflash": _dflash,
    "autoregressive": _autoregressive,
    "eagle3": _eagle3,
}


def _stored(prefix: str, network: Network, part: Part) -> StoredWeight:
    integers = dflash.INTEGER_TENSORS.issuperset(part.sources)
    return StoredWeight(f"{prefix}{part.name}", part.shape, network, part.sources, integers)


def _projected(layer: Layer) -> tuple[Part, ...]:
    """The parts that compute queries, keys and values."""
    return _present(layer.qkv, layer.qkv_bias)


def _other_parts(layer: Layer) -> tuple[Part, ...]:
    norms = (layer.input_norm, layer.post_norm)
    return _present(layer.q_norm, layer.k_norm, layer.o, *norms, layer.router, layer.gate_up, layer.down)


def _present(*parts: Part | None) -> tuple[Part, ...]:
    return tuple(part for part in parts if part is not None)
