"""The graph of a TensorRT engine's third plan: it moves a verified tree's accepted rows to the front, in place.

It works on one slot, in all planes of the target's cache at once, so that a commit is one execution:

- `past_len` int32 [1]: committed rows of the slot.
- `keep` int32 [K], or [1, K] with our plugin: row past_len + keep[j] becomes row past_len + j. The path's row numbers,
  rising, so keep[j] >= j; entries behind the path are keep[j] = j, which leaves a row as it is. Required: past_len + K
  <= S, past_len + keep[j] < S.

In engines of our plugins it is one layer, `DDTreeKVCompact`, over the whole cache and `slot_ids` int32 [1]:
`past_cache` and `present_cache` [P, stored slots, Hkv, S, D] at one address. P, the number of planes, is a dimension of
the call, so that the builder, which tries a layer on buffers of its own, does not allocate the cache twice.

In engines of native attention it is a gather and a cache update for each plane: `past_key.i`, `past_value.i`
[1, Hkv, S, D] and the outputs `present_key.i`, `present_value.i` are the slot's own part of each plane, past and
present at one address. The gather makes a copy [1, Hkv, K, D] of the rows, on which the update in place depends, so
that rows are read before any is written.

All shapes of a call are fixed, so that one CUDA graph for each slot serves every commit. K is `window_rows`: no draft
of a block is longer. A longer path takes several executions, front to back: the next one has past_len + K, and
keep[K:] − K. A last window that would end behind the cache begins earlier, with keep[j] = j for what is in its place
already.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import AttentionName
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph
from ddtree_trt.build.graph.ops import TYPES
from ddtree_trt.device.buffers import CacheShape
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims

PLANES = "P"


def window_rows(drafter: TransformerDims) -> int:
    """K: the longest path of a drafter's chain, its root included."""
    return 1 + kind_of(drafter).longest_draft


def compaction_graph(cache: CacheShape, floats: str, window: int, attention: AttentionName) -> ModelProto:
    """The graph for a target's cache of `floats`, which moves up to `window` rows (K) per execution."""
    native = attention == "native"
    past, present = names.past_names(cache.planes // 2), names.present_names(cache.planes // 2)
    if native:
        inputs = {names.PAST_LEN: [1], names.KEEP: [window]}
        shape: list[int | str] = [1, *cache.slot_shape]
        nodes = [
            helper.make_node("Add", [names.KEEP, names.PAST_LEN], ["rows"], name="rows"),
            helper.make_node("Cast", [names.PAST_LEN], ["start"], name="start", to=TensorProto.INT64),
        ]
        for source, result in zip(past, present, strict=True):
            moved = f"{source}.moved"
            nodes += [
                helper.make_node("Gather", [source, "rows"], [moved], name=moved, axis=2),
                helper.make_node("TensorScatter", [source, moved, "start"], [result], name=result, axis=2),
            ]
    else:
        inputs = {names.SLOT_IDS: [1], names.PAST_LEN: [1], names.KEEP: [1, window]}
        past, present = [names.PAST_CACHE], [names.PRESENT_CACHE]
        shape = [PLANES, cache.stored_slots, *cache.slot_shape]
        found = {"plugin_namespace": plugins.NAMESPACE, "plugin_version": plugins.VERSION}
        given = [names.PAST_CACHE, names.SLOT_IDS, names.PAST_LEN, names.KEEP]  # the order of plugins.CompactInput
        nodes = [helper.make_node(plugins.COMPACT, given, present, "compact", domain=plugins.NAMESPACE, **found)]
    graph = helper.make_graph(
        nodes,
        "compaction",
        [
            *(helper.make_tensor_value_info(name, TensorProto.INT32, dims) for name, dims in inputs.items()),
            *(helper.make_tensor_value_info(name, TYPES[floats], shape) for name in past),
        ],
        [helper.make_tensor_value_info(name, TYPES[floats], shape) for name in present],
    )
    lowering = NativeGraph if native else PluginGraph
    opsets = [helper.make_opsetid("", lowering.opset), *(helper.make_opsetid(d, 1) for d in lowering.domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=lowering.ir_version, producer_name="ddtree-trt")
