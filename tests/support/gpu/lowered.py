"""The TensorRT graphs of either lowering in ONNX Runtime.

A plugin's node gets a body of ONNX operators. The body says what the kernels do, as `kernel_reference.py` does, for
ONNX Runtime to run; nothing of it is packaged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.build.graph.lowering_tensorrt import PluginGraph
from ddtree_trt.plugins import MaskMode

# Operators of docs/operators.md in onnx/onnx-tensorrt that its table says TensorRT 11.0 supports, of those a
# transformer might use (commit 2f3fa349247d9ff52d7662cb995c82278df31a86). Attention, RMSNormalization, RotaryEmbedding
# and Swish are there too, but not in 10.13.
SUPPORTED = frozenset(
    """
    Abs Add And ArgMax Cast CastLike Clip Concat Constant ConstantOfShape CumSum DequantizeLinear Div Einsum Equal Erf
    Exp Expand Flatten Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity LayerNormalization Less
    LessOrEqual Log LogSoftmax MatMul Max Mean Min Mod Mul Neg Not OneHot Or Pad Pow QuantizeLinear Range Reciprocal
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape ScatterElements ScatterND Shape Sigmoid Slice
    Softmax Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Trilu Unsqueeze Where
    """.split()
)

_ATTRIBUTES = ", ".join([*plugins.ATTENTION_ATTRIBUTES, "plugin_namespace", "plugin_version"])
_BODY = """
<opset_import: ["" : {opset}], domain: "ddtree">
DDTreeAttention <{attributes}> (q, k, v, past_k, past_v, slot_ids, past_len, tree_mask) => (attn, present_k, present_v)
{{
    n = Shape <start = 0, end = 1> (q)
    t = Shape <start = 1, end = 2> (q)
    d = Shape <start = 3, end = 4> (q)
    heads = Shape <start = 1, end = 2> (past_k)
    s = Shape <start = 2, end = 3> (past_k)
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    last = Constant <value = int64[1] {{-1}}> ()
    first = Constant <value = int64[1] {{1}}> ()
    second = Constant <value = int64[1] {{2}}> ()
    slots = Cast <to = 7> (slot_ids)
    past = Cast <to = 7> (past_len)
    t0 = Squeeze (t)
    s0 = Squeeze (s)
    heads0 = Squeeze (heads)
    rows = Range (zero, t0, one)
    columns = Range (zero, s0, one)
    every_head = Range (zero, heads0, one)
    by_slot = Constant <value = int64[3] {{-1, 1, 1}}> ()
    by_head = Constant <value = int64[3] {{1, -1, 1}}> ()
    slot_index = Reshape (slots, by_slot)
    head_index = Reshape (every_head, by_head)
    starts = Reshape (past, by_slot)
    row_index = Add (starts, rows)
    place = Concat <axis = 0> (n, heads, t)
    slot_all = Expand (slot_index, place)
    head_all = Expand (head_index, place)
    row_all = Expand (row_index, place)
    slot_part = Unsqueeze (slot_all, last)
    head_part = Unsqueeze (head_all, last)
    row_part = Unsqueeze (row_all, last)
    index = Concat <axis = -1> (slot_part, head_part, row_part)
    new_k = Transpose <perm = [0, 2, 1, 3]> (k)
    new_v = Transpose <perm = [0, 2, 1, 3]> (v)
    present_k = ScatterND (past_k, index, new_k)
    present_v = ScatterND (past_v, index, new_v)
    keys_half = Gather <axis = 0> (present_k, slots)
    values_half = Gather <axis = 0> (present_v, slots)
    keys = Cast <to = 1> (keys_half)
    values = Cast <to = 1> (values_half)
    queries = Cast <to = 1> (q)
    swapped = Transpose <perm = [0, 2, 1, 3]> (queries)
    group_shape = Concat <axis = 0> (n, heads, last, t, d)
    grouped = Reshape (swapped, group_shape)
    keys5 = Unsqueeze (keys, second)
    values5 = Unsqueeze (values, second)
    keys_turned = Transpose <perm = [0, 1, 2, 4, 3]> (keys5)
    products = MatMul (grouped, keys_turned)
    scale = Constant <value_float : float = @scale> ()
    scores = Mul (products, scale)
    new = Sub (columns, starts)
    in_past = Less (new, zero)
    behind = Less (new, t0)
    not_past = Not (in_past)
    in_call = And (not_past, behind)
{seen_new}
    seen = Or (in_past, seen_new)
    seen_all = Unsqueeze (seen, first)
    seen_by_head = Unsqueeze (seen_all, first)
    hidden = Constant <value = float {{-1e30}}> ()
    masked = Where (seen_by_head, scores, hidden)
    weights = Softmax <axis = -1> (masked)
    out5 = MatMul (weights, values5)
    all_heads = Concat <axis = 0> (n, last, t, d)
    out4 = Reshape (out5, all_heads)
    out = Transpose <perm = [0, 2, 1, 3]> (out4)
    attn = CastLike (out, q)
}}
"""
# For one sequence. Entries of `keep` from the first that does not rise on leave their rows as they are.
_COMPACT_BODY = """
<opset_import: ["" : {opset}], domain: "ddtree">
DDTreeKVCompact <plugin_namespace, plugin_version> (past_cache, slot_ids, past_len, keep) => (present_cache)
{{
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    flat = Constant <value = int64[1] {{-1}}> ()
    first = Constant <value = int64[1] {{1}}> ()
    start = Cast <to = 7> (past_len)
    kept_wide = Cast <to = 7> (keep)
    kept = Reshape (kept_wide, flat)
    window = Shape (kept)
    window0 = Squeeze (window)
    own = Range (zero, window0, one)
    begin = Constant <value = int64[1] {{0}}> ()
    all_but_last = Constant <value = int64[1] {{-1}}> ()
    earlier = Slice (kept, begin, all_but_last)
    before = Concat <axis = 0> (flat, earlier)
    falls = LessOrEqual (kept, before)
    fall = Cast <to = 7> (falls)
    fallen = CumSum (fall, zero)
    rises = Equal (fallen, zero)
    source = Where (rises, kept, own)
    target_rows = Add (own, start)
    source_rows = Add (source, start)
    s = Shape <start = 3, end = 4> (past_cache)
    s0 = Squeeze (s)
    every_row = Range (zero, s0, one)
    rows = ScatterElements <axis = 0> (every_row, target_rows, source_rows)
    moved = Gather <axis = 3> (past_cache, rows)
    slots = Shape <start = 1, end = 2> (past_cache)
    slots0 = Squeeze (slots)
    every_slot = Range (zero, slots0, one)
    slot = Cast <to = 7> (slot_ids)
    this = Equal (every_slot, slot)
    by_slot = Constant <value = int64[5] {{1, -1, 1, 1, 1}}> ()
    here = Reshape (this, by_slot)
    present_cache = Where (here, moved, past_cache)
}}
"""
_SEEN: dict[MaskMode, str] = {
    MaskMode.NONE: "    seen_new = Identity (in_call)",
    MaskMode.CAUSAL: """
    row_column = Unsqueeze (rows, last)
    earlier = LessOrEqual (new, row_column)
    seen_new = And (earlier, in_call)""",
    MaskMode.TREE: """
    words = Cast <to = 12> (tree_mask)
    words_apart = Unsqueeze (words, last)
    shift_wide = Constant <value = int64[32] {shifts}> ()
    shifts = Cast <to = 12> (shift_wide)
    one_bit = Cast <to = 12> (one)
    shifted = BitShift <direction = "RIGHT"> (words_apart, shifts)
    bits_apart = BitwiseAnd (shifted, one_bit)
    bits_number = Cast <to = 6> (bits_apart)
    flat = Constant <value = int64[3] {{0, 0, -1}}> ()
    bits = Reshape (bits_number, flat)
    width = Shape <start = 2, end = 3> (bits)
    width0 = Squeeze (width)
    limit = Sub (width0, one)
    inside = Clip (new, zero, limit)
    square = Concat <axis = 0> (n, t, s)
    chosen = Expand (inside, square)
    bit = GatherElements <axis = 2> (bits, chosen)
    set = Cast <to = 9> (bit)
    row_column = Unsqueeze (rows, last)
    topological = LessOrEqual (new, row_column)
    set_earlier = And (set, topological)
    seen_new = And (set_earlier, in_call)""".replace("{shifts}", "{{" + ", ".join(map(str, range(32))) + "}}"),
}


def attention_body(mode: MaskMode, name: str = plugins.ATTENTION) -> FunctionProto:
    """`DDTreeAttention` in one mask mode, as a function of ONNX operators of that name."""
    seen = _SEEN[mode].replace("{{", "{").replace("}}", "}")
    text = _BODY.format(opset=PluginGraph.opset, attributes=_ATTRIBUTES, seen_new=seen)
    return onnx.parser.parse_function(text.replace(plugins.ATTENTION, name))


def compact_body() -> FunctionProto:
    """`DDTreeKVCompact` as a function of ONNX operators of that name."""
    return onnx.parser.parse_function(_COMPACT_BODY.format(opset=PluginGraph.opset))


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
