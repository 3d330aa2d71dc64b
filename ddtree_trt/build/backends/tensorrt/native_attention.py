"""Attention of the native lowering, mended between TensorRT's parser and its builder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddtree_trt.build.graph.lowering_native import KEY_LENGTHS
from ddtree_trt.errors import BuildError

_UNSUPPORTED = "Attention operation was not supported"  # by a fused kernel: the builder's words for it


def mend_attentions(trt: Any, network: Any, name: str, attentions: Sequence[str]) -> None:
    """Set what the parser cannot say, on every attention of the parsed INetworkDefinition of the `name`.

    `attentions` are the graph's attention nodes. Each reads its cache as far as it is written (`key_value_lengths`),
    reads it as it is, without the parser's product with a scale of 1, and may not be decomposed into other layers.
    Raises BuildError with the name of a node that did not become an attention over an updated cache.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    makers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    lengths = makers[KEY_LENGTHS].get_output(0)
    found = {attention.name: attention for attention in _attentions(trt, network)}
    for node in attentions:
        attention = found.pop(node, None)
        if attention is None:
            raise BuildError(f"TensorRT made no attention layer of the {name}'s node {node!r}")
        for index in (0, 1):
            attention.set_input(index, _unscaled(trt, makers, attention.get_input(index)))
        for index in (1, 2):
            maker = makers.get(attention.get_input(index).name)
            if maker is None or maker.type != trt.LayerType.KV_CACHE_UPDATE:
                raise BuildError(f"TensorRT's attention {node!r} of the {name} does not read the cache it updates")
        attention.key_value_lengths = lengths
        attention.decomposable = False
    if found:
        raise BuildError(f"TensorRT made an attention of the {name} that its graph does not have: {min(found)!r}")


def unfused_attention(trt: Any, network: Any, reasons: str) -> str:
    """What a failed build says of attentions, where its reasons are that they have no fused kernel; else "". The layers
    of a network are alike."""
    attention = next(_attentions(trt, network), None)
    if _UNSUPPORTED not in reasons or attention is None:
        return ""
    query, keys = attention.get_input(0), attention.get_input(1)
    return (
        f"attention {attention.name!r} has no fused kernel for {query.dtype.name} queries {list(query.shape)} over a "
        f"cache {list(keys.shape)}"
    )


def _attentions(trt: Any, network: Any) -> Iterator[Any]:
    """The network's IAttention objects."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings return the base class
            yield layer.attention


def _unscaled(trt: Any, makers: dict[str, Any], tensor: Any) -> Any:
    """The tensor, or what the parser multiplied to make it."""
    maker = makers.get(tensor.name)
    return maker.get_input(0) if maker is not None and maker.type == trt.LayerType.ELEMENTWISE else tensor
