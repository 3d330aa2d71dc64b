"""The torch backend's weight file: names and shapes of its tensors, and which checkpoint tensors each is made of.

Tensors that are multiplied together lie side by side, joined along their first axis, so that joining is writing one
after another. Projections are [out, in], as in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.artifact.manifest import DrafterDims, TransformerDims
from ddtree_trt.models.drafters.kinds import KindName, kind_of

Network = Literal["target", "drafter"]
TARGET, DRAFTER = "target.", "drafter."  # prefixes


@dataclass(frozen=True)
class StoredWeight:
    name: str
    shape: tuple[int, ...]
    network: Network  # whose checkpoint the sources are in
    sources: tuple[str, ...]  # Hugging Face names, in order


def stored_weights(
    target: TransformerDims, drafter: TransformerDims, *, target_tied: bool, drafter_tied: bool
) -> list[StoredWeight]:
    """Everything in the file, in its order. A network without `head` uses its embedding; DFlash uses the target's."""
    own = _DRAFTERS[kind_of(drafter).name](drafter, drafter_tied)
    return [*_language_model(TARGET, "target", target, target_tied), *own]


def _language_model(prefix: str, network: Network, dims: TransformerDims, tied: bool) -> Iterator[StoredWeight]:
    table = (dims.vocab_size, dims.hidden_size)
    yield StoredWeight(f"{prefix}embedding", table, network, ("model.embed_tokens.weight",))
    if not tied:
        yield StoredWeight(f"{prefix}head", table, network, ("lm_head.weight",))
    for i in range(dims.num_layers):
        layer, source = f"{prefix}layers.{i}.", f"model.layers.{i}"
        yield StoredWeight(f"{layer}qkv", _qkv_shape(dims), network, _qkv(source))
        yield from _rest_of_layer(layer, source, network, dims)
    yield StoredWeight(f"{prefix}norm", (dims.hidden_size,), network, ("model.norm.weight",))


def _autoregressive(dims: TransformerDims, tied: bool) -> Iterator[StoredWeight]:
    return _language_model(DRAFTER, "drafter", dims, tied)


def _dflash(dims: DrafterDims, tied: bool) -> Iterator[StoredWeight]:
    layers = range(dims.num_layers)
    hidden = dims.hidden_size
    yield StoredWeight(f"{DRAFTER}fc", (hidden, len(dims.tap_layers) * hidden), "drafter", ("fc.weight",))
    yield StoredWeight(f"{DRAFTER}context_norm", (hidden,), "drafter", ("hidden_norm.weight",))
    # One tensor over all layers: the context's keys and values of every layer come out of one product.
    sources = tuple(name for i in layers for name in _qkv(f"layers.{i}"))
    yield StoredWeight(f"{DRAFTER}qkv", (dims.num_layers, *_qkv_shape(dims)), "drafter", sources)
    for i in layers:
        yield from _rest_of_layer(f"{DRAFTER}layers.{i}.", f"layers.{i}", "drafter", dims)
    yield StoredWeight(f"{DRAFTER}norm", (hidden,), "drafter", ("norm.weight",))


# A drafter's own weights, by its kind: (dimensions, whether its head is its embedding) → weights.
_DRAFTERS: Mapping[KindName, Callable[[Any, bool], Iterator[StoredWeight]]] = {
    "dflash": _dflash,
    "autoregressive": _autoregressive,
}


def _qkv_shape(dims: TransformerDims) -> tuple[int, int]:
    return (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim, dims.hidden_size


def _qkv(source: str) -> tuple[str, ...]:
    return tuple(f"{source}.self_attn.{part}_proj.weight" for part in "qkv")


def _rest_of_layer(layer: str, source: str, network: Network, dims: TransformerDims) -> Iterator[StoredWeight]:
    hidden, inner, head = dims.hidden_size, dims.intermediate_size, dims.head_dim
    heads = dims.num_heads * head
    for name, shape, sources in (
        ("q_norm", (head,), ("self_attn.q_norm",)),
        ("k_norm", (head,), ("self_attn.k_norm",)),
        ("o", (hidden, heads), ("self_attn.o_proj",)),
        ("input_norm", (hidden,), ("input_layernorm",)),
        ("post_norm", (hidden,), ("post_attention_layernorm",)),
        ("gate_up", (2 * inner, hidden), ("mlp.gate_proj", "mlp.up_proj")),
        ("down", (hidden, inner), ("mlp.down_proj",)),
    ):
        yield StoredWeight(f"{layer}{name}", shape, network, tuple(f"{source}.{s}.weight" for s in sources))
