"""The graph of a native engine's third plan: it moves a verified tree's accepted rows to the front, in place.

Engines whose attention is native need no library of ours; where the kernel `compact` is not built, the run time commits
with this plan. It works on one slot, in all planes of the target's cache at once, so that a commit is one execution:

- `past_len` int32 [1]: committed rows of the slot.
- `keep` int32 [K]: row past_len + keep[j] becomes row past_len + j. The path's row numbers, rising, so keep[j] >= j;
  entries behind the path are keep[j] = j, which leaves a row as it is. Required: past_len + K <= S, past_len +
  keep[j] < S.
- `past_key.i`, `past_value.i` [1, Hkv, S, D] and the outputs `present_key.i`, `present_value.i`: the slot's own part of
  each plane, past and present at one address.

All shapes are fixed, so that one CUDA graph for each slot, with addresses that never change, serves every commit. K is
`window_rows`: no draft of a block is longer. A longer path takes several executions, front to back: the next one has
past_len + K, and keep[K:] − K. A last window that would end behind the cache begins earlier, with keep[j] = j for what
is in its place already.

The rows are read before any is written: a gather makes a copy [1, Hkv, K, D] of the rows, and the cache update, which
in TensorRT is done in place, depends on that copy.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, helper

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_native import NativeGraph
from ddtree_trt.build.graph.ops import TYPES
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims

_ROWS = 2  # the axis of a cache's rows


def window_rows(drafter: TransformerDims) -> int:
    """K: the longest path of a drafter's chain, its root included."""
    return 1 + kind_of(drafter).longest_draft


def compaction_graph(target: TransformerDims, limits: Limits, floats: str, window: int) -> ModelProto:
    """The graph for a target's cache of `floats`, which moves up to `window` rows (K) per execution."""
    shape = [1, target.num_kv_heads, limits.cache_rows, target.head_dim]
    past, present = names.past_names(target.num_layers), names.present_names(target.num_layers)
    nodes = [
        helper.make_node("Add", [names.KEEP, names.PAST_LEN], ["rows"], name="rows"),
        helper.make_node("Cast", [names.PAST_LEN], ["start"], name="start", to=TensorProto.INT64),
    ]
    for source, result in zip(past, present, strict=True):
        nodes += _move(source, result)
    inputs = [
        helper.make_tensor_value_info(names.PAST_LEN, TensorProto.INT32, [1]),
        helper.make_tensor_value_info(names.KEEP, TensorProto.INT32, [window]),
        *(helper.make_tensor_value_info(name, TYPES[floats], shape) for name in past),
    ]
    outputs = [helper.make_tensor_value_info(name, TYPES[floats], shape) for name in present]
    graph = helper.make_graph(nodes, "compaction", inputs, outputs)
    opsets, version = [helper.make_opsetid("", NativeGraph.opset)], NativeGraph.ir_version
    return helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="ddtree-trt")


def _move(past: str, present: str) -> list[NodeProto]:
    """The nodes of one plane."""
    moved = f"{past}.moved"
    return [
        helper.make_node("Gather", [past, "rows"], [moved], name=moved, axis=_ROWS),
        helper.make_node("TensorScatter", [past, moved, "start"], [present], name=present, axis=_ROWS),
    ]
