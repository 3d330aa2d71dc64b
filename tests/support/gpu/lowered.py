"""The TensorRT graphs of either lowering in ONNX Runtime.

A plugin's node gets a body of ONNX operators. The body says what the kernels do, as `kernel_reference.py` does, for
ONNX Runtime to run; nothing of it is packaged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.build.graph.lowering_tensorrt import PluginGraph
from ddtree_trt.plugins import MaskMode

FLOAT, INT32, INT64, UINT32, BOOL = (getattr(TensorProto, kind) for kind in "FLOAT INT32 INT64 UINT32 BOOL".split())


class _Body:
    """Nodes of a function's body: `op.Add(x, y)` appends one and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []

    def __getattr__(self, kind: str) -> Any:
        def append(*inputs: str, out: str | None = None, **attributes: Any) -> str:
            name = out or f"{kind}.{len(self.nodes)}"
            self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
            return name

        return append

    def int64(self, *values: int) -> str:
        return str(self.Constant(value_ints=list(values)))

    def size(self, x: str, axis: int) -> str:
        """int64 [1]."""
        return str(self.Shape(x, start=axis, end=axis + 1))

    def range(self, size: str) -> str:
        return str(self.Range(self.Constant(value_int=0), self.Squeeze(size), self.Constant(value_int=1)))

    def function(self, name: str, inputs: str, outputs: str, attributes: Sequence[str] = ()) -> FunctionProto:
        names = [*attributes, "plugin_namespace", "plugin_version"]
        opset = [helper.make_opsetid("", PluginGraph.opset)]
        return helper.make_function(plugins.NAMESPACE, name, inputs.split(), outputs.split(), self.nodes, opset, names)


def attention_body(mode: MaskMode, name: str = plugins.ATTENTION) -> FunctionProto:
    """`DDTreeAttention` in one mask mode, as a function of ONNX operators of that name."""
    op = _Body()
    n, t, d, heads, s = op.size("q", 0), op.size("q", 1), op.size("q", 3), op.size("past_k", 1), op.size("past_k", 2)
    last, by_slot = op.int64(-1), op.int64(-1, 1, 1)
    slots, rows = op.Cast("slot_ids", to=INT64), op.range(t)
    starts = op.Reshape(op.Cast("past_len", to=INT64), by_slot)  # [N, 1, 1]
    # Slot, head and row of every new key and value: [N, Hkv, T, 3]
    place = op.Concat(n, heads, t, axis=0)
    parts = op.Reshape(slots, by_slot), op.Reshape(op.range(heads), op.int64(1, -1, 1)), op.Add(starts, rows)
    index = op.Concat(*(op.Unsqueeze(op.Expand(part, place), last) for part in parts), axis=-1)
    for x in "kv":
        op.ScatterND(f"past_{x}", index, op.Transpose(x, perm=[0, 2, 1, 3]), out=f"present_{x}")
    single = (op.Cast(op.Gather(f"present_{x}", slots, axis=0), to=FLOAT) for x in "kv")
    keys, values = (op.Unsqueeze(x, op.int64(2)) for x in single)  # [N, Hkv, 1, S, D]
    grouped = op.Concat(n, heads, last, t, d, axis=0)
    queries = op.Reshape(op.Transpose(op.Cast("q", to=FLOAT), perm=[0, 2, 1, 3]), grouped)
    scale = op.Constant(value_float=0.0)
    op.nodes[-1].attribute[0].ref_attr_name = plugins.SCALE  # in place of the 0
    op.nodes[-1].attribute[0].ClearField("f")
    scores = op.Mul(op.MatMul(queries, op.Transpose(keys, perm=[0, 1, 2, 4, 3])), scale)

    new = op.Sub(op.range(s), starts)  # [N, 1, S]: a cache row's place among the new ones
    in_past = op.Less(new, op.int64(0))
    seen = op.And(op.Not(in_past), op.Less(new, t))
    if mode is not MaskMode.NONE:
        seen = op.And(seen, op.LessOrEqual(new, op.Unsqueeze(rows, last)))
    if mode is MaskMode.TREE:
        words = op.Unsqueeze(op.Cast("tree_mask", to=UINT32), last)
        shifted = op.BitShift(words, op.Cast(op.int64(*range(32)), to=UINT32), direction="RIGHT")
        bits = op.Cast(op.BitwiseAnd(shifted, op.Cast(op.int64(1), to=UINT32)), to=INT32)
        bits = op.Reshape(bits, op.int64(0, 0, -1))
        inside = op.Min(op.Max(new, op.int64(0)), op.Sub(op.size(bits, 2), op.int64(1)))
        chosen = op.GatherElements(bits, op.Expand(inside, op.Concat(n, t, s, axis=0)), axis=2)
        seen = op.And(seen, op.Cast(chosen, to=BOOL))
    visible = op.Unsqueeze(op.Or(in_past, seen), op.int64(1, 2))
    weights = op.Softmax(op.Where(visible, scores, op.Constant(value_float=-1e30)), axis=-1)
    out = op.Reshape(op.MatMul(weights, values), op.Concat(n, last, t, d, axis=0))
    op.CastLike(op.Transpose(out, perm=[0, 2, 1, 3]), "q", out="attn")
    inputs = "q k v past_k past_v slot_ids past_len tree_mask"
    return op.function(name, inputs, "attn present_k present_v", plugins.ATTENTION_ATTRIBUTES)


def compact_body() -> FunctionProto:
    """`DDTreeKVCompact` for one sequence as a function of ONNX operators. Entries of `keep` from the first that does
    not rise on leave their rows as they are."""
    op = _Body()
    start, flat = op.Cast("past_len", to=INT64), op.int64(-1)
    kept = op.Reshape(op.Cast("keep", to=INT64), flat)
    own = op.range(op.Shape(kept))
    before = op.Concat(flat, op.Slice(kept, op.int64(0), flat), axis=0)
    fallen = op.CumSum(op.Cast(op.LessOrEqual(kept, before), to=INT64), op.Constant(value_int=0))
    source = op.Where(op.Equal(fallen, op.int64(0)), kept, own)
    every_row = op.range(op.size("past_cache", 3))
    rows = op.ScatterElements(every_row, op.Add(own, start), op.Add(source, start), axis=0)
    here = op.Equal(op.range(op.size("past_cache", 1)), op.Cast("slot_ids", to=INT64))
    moved = op.Gather("past_cache", rows, axis=3)
    op.Where(op.Reshape(here, op.int64(1, -1, 1, 1, 1)), moved, "past_cache", out="present_cache")
    return op.function(plugins.COMPACT, "past_cache slot_ids past_len keep", "present_cache")


def with_body(model: ModelProto) -> ModelProto:
    """A copy of a graph that other runtimes can run, with attention as GPUs compute it: halves multiplied and summed in
    float32."""
    copy = ModelProto()
    copy.CopyFrom(model)
    modes = set()
    del copy.graph.node[:]
    for node in model.graph.node:
        if node.op_type == plugins.ATTENTION:
            (mode,) = (MaskMode(a.i) for a in node.attribute if a.name == plugins.MASK_MODE)
            modes.add(mode)
            copied = copy.graph.node.add()
            copied.CopyFrom(node)
            copied.op_type = f"{plugins.ATTENTION}{mode.name}"
        else:
            copy.graph.node.extend(_summed_in_float32(node) if node.op_type == "Attention" else [node])
    copy.functions.extend(attention_body(mode, f"{plugins.ATTENTION}{mode.name}") for mode in sorted(modes))
    if any(node.op_type == plugins.COMPACT for node in model.graph.node):
        copy.functions.append(compact_body())
    return copy


def _summed_in_float32(attention: NodeProto) -> list[NodeProto]:
    """The node between casts. ONNX Runtime's own sums of halves are of halves."""
    (out,), inputs = attention.output, list(attention.input)
    casts = [helper.make_node("Cast", [x], [f"{x}.{out}"], to=TensorProto.FLOAT) for x in inputs[:3]]
    node = NodeProto()
    node.CopyFrom(attention)
    node.input[:3] = [cast.output[0] for cast in casts]
    node.output[:] = [f"{out}.single"]
    return [*casts, node, helper.make_node("CastLike", [node.output[0], inputs[0]], [out])]


class Session:
    """One graph in a session of ONNX Runtime."""

    def __init__(self, path: Path, model: ModelProto) -> None:
        """`path` is where the model goes: beside its weight file."""
        path.write_bytes(with_body(model).SerializeToString())
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        # Its fusion of products with what quantises them takes FP8 for 8-bit integers.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.types = {i.name: kinds.get(i.type, np.int32) for i in self.session.get_inputs()}
