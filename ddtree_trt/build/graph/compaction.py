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

Of a hybrid it also advances the states of the slot, natively only, by `taken` and `before`, rows of the target's last
pass; `build/graph/delta.py` says how.

All shapes of a call are fixed, so that one CUDA graph for each slot serves every commit. K is `window_rows`: no draft
of a block is longer. A longer path takes several executions, front to back: the next one has past_len + K, and
keep[K:] − K. A last window that would end behind the cache begins earlier, with keep[j] = j for what is in its place
already.
"""

from onnx import ModelProto

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.build.graph import delta
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.build.graph.ops import Shape, Sink
from ddtree_trt.device.buffers import CacheShape, pass_rows
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.delta import DeltaNet

PLANES = "P"


def window_rows(drafter: TransformerDims) -> int:
    """K: the longest path of a drafter's chain, its root included."""
    return 1 + kind_of(drafter).longest_draft


def compaction_graph(
    sink: Sink, target: TransformerDims, limits: Limits, precision: PrecisionName, window: int, attention: AttentionName
) -> ModelProto:
    """The graph for a target's cache in that precision, which moves up to `window` rows (K) per execution; `sink` is
    given no weight."""
    floats, value_bytes = PRECISIONS[precision].dtype, PRECISIONS[precision].value_bytes
    cache = CacheShape.of(target, limits, value_bytes)
    if attention != "native":
        g: TensorRtGraph = PluginGraph("compaction", sink, floats)
        whole: Shape = [PLANES, cache.stored_slots, *cache.slot_shape]
        for name, extents in ((names.SLOT_IDS, [1]), (names.PAST_LEN, [1]), (names.KEEP, [1, window])):
            g.input(name, "int32", extents)
        inputs = [g.input(names.PAST_CACHE, floats, whole), names.SLOT_IDS, names.PAST_LEN, names.KEEP]
        found = {"plugin_namespace": plugins.NAMESPACE, "plugin_version": plugins.VERSION}
        g.op(plugins.COMPACT, inputs, [names.PRESENT_CACHE], domain=plugins.NAMESPACE, **found)
        g.output(names.PRESENT_CACHE, floats, whole)
        return g.model()
    g = NativeGraph("compaction", sink, floats)
    past = g.input(names.PAST_LEN, "int32", [1])
    rows = g.op("Add", [g.input(names.KEEP, "int32", [window]), past], ["rows"])
    start = g.cast(past, "int64", "start")
    layers, shape = cache.planes // 2, [1, *cache.slot_shape]
    for source, result in zip(*(names.plane_names(part, layers) for part in ("past", "present")), strict=True):
        moved = g.op("Gather", [g.input(source, floats, shape), rows], [f"{source}.moved"], axis=2)
        g.op("TensorScatter", [source, moved, start], [result], axis=2)
        g.output(result, floats, shape)
    if target.delta is not None:
        _advance(g, target.delta, len(target.delta_layers), pass_rows(limits, limits.max_batch), window)
    return g.model()


def _advance(g: TensorRtGraph, net: DeltaNet, layers: int, rows: int, window: int) -> None:
    """The states of so many delta-net layers; a pass keeps up to `rows` rows for a commit."""
    taken, before = g.input(names.TAKEN, "int32", [window]), g.input(names.BEFORE, "int32", [1])
    shapes = (1, net.value_heads, net.key_dim, net.value_dim), (1, 1, net.taps - 1, net.channels)
    for layer in range(layers):
        past, present = names.state_names("past", layer), names.state_names("present", layer)
        for name, result, shape in zip(past, present, shapes, strict=True):
            g.input(name, "float32", shape)
            g.output(result, "float32", shape)
        kept = g.input(names.kept_name(layer), "float32", [rows, sum(delta.kept_widths(net))])
        delta.advance(g, past, kept, (taken, before), net, present)
