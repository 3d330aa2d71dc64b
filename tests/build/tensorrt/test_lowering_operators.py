"""Operators of the TensorRT lowerings in ONNX Runtime: the native one's mask against its definition, its operators of
opset 24 against their spelled-out forms, and the body that stands for our plugin against what the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from kernel_reference import attention, packed_mask
from lowered import attention_body
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.build.graph.ops import Attention
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import MaskMode


def one_attention(g: TensorRtGraph, tokens: str, tree: int) -> Attention:
    """A graph's inputs for `tokens` rows of at most `tree`, over one layer's cache of 64 + `tree` rows."""
    g.row_inputs(tokens, tree, masked=True)
    dims = TransformerDims(96, 32, 1, 2, 1, 8, 48, 1e-6, 1e4, 64)
    g.cache(dims, Limits(max_seq_len=64, max_tree_budget=tree - 1, prefill_chunk=tree))
    return Attention(0, ("cos", "sin"), (2, 1), 8)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
def test_the_mask_is_the_past_and_the_bits(tokens: int, tmp_path: Path) -> None:
    """Words whose bit 31 is set, words of rows that are not in the call, a bit of every column."""
    rng = np.random.default_rng(tokens)
    with WeightFile(tmp_path / "weights.bin") as sink:
        g = NativeGraph("mask", sink, "float32")
        one_attention(g, "T", 70)
        mask = g._tree_visible()
        g.output(mask, "bool", ["N", 1, "T", "S"])
        model = without_unused_outputs(g.model())
    words = rng.integers(-(2**31), 2**31, (2, tokens, 3)).astype(np.int32)
    words[:, 0] = -1  # every bit, also of rows behind the call
    words[0, -1], words[1, -1] = 1 << 30, np.int32(-(2**31))
    starts = np.array([0, 23], np.int32)
    feed = {names.TREE_MASK: words, names.PAST_LEN: starts, names.POSITIONS: np.zeros((2, tokens), np.int32)}
    (found,) = ort.InferenceSession(model.SerializeToString()).run([mask], feed)
    expected = np.zeros(found.shape, bool)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    for n, start in enumerate(starts):
        expected[n, 0, :, :start] = True
        expected[n, 0, :, start : start + tokens] = bits[n, :, :tokens]
    np.testing.assert_array_equal(found, expected)


def without_unused_outputs(model: ModelProto) -> ModelProto:
    """The graph without the caches, which none of its nodes reads or writes."""
    for values in (model.graph.input, model.graph.output):
        kept = [v for v in values if not v.name.startswith(("past_key", "past_value", "present_"))]
        del values[:]
        values.extend(kept)
    return model


OPERATORS: dict[str, Callable[[TensorRtGraph, str], str]] = {
    "rms_norm": lambda g, x: g.rms_norm(x, g.constant("weight", np.linspace(0.5, 2, 64, dtype=np.float32)), "y", 1e-6),
    "swiglu": lambda g, x: g.swiglu(x, x, "y"),
}


@pytest.mark.parametrize(("floats", "steps"), [("float32", 1e-6), ("float16", 2**-10)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_of_opset_24_give_the_spelled_out_numbers(
    operator: str, floats: str, steps: float, tmp_path: Path
) -> None:
    """To the last bit or so of the precision: both compute in float32 and round once."""
    x = np.random.default_rng(1).standard_normal((3, 5, 64)) * np.geomspace(1e-3, 30, 64)
    results = []
    for lowering in (NativeGraph, PluginGraph):
        with WeightFile(tmp_path / f"{lowering.__name__}.bin") as sink:
            g = lowering("one", sink, floats)
            y = OPERATORS[operator](g, g.input("x", floats, [3, 5, 64]))
            g.output(y, floats, [3, 5, 64])
        results.append(run(g.model(), floats, x))
    np.testing.assert_allclose(results[0], results[1], rtol=2 * steps, atol=1e-7)


@pytest.mark.parametrize(("floats", "steps"), [("float32", 1e-6), ("float16", 2**-10)])
def test_rotary_embedding_gives_the_spelled_out_numbers(floats: str, steps: float, tmp_path: Path) -> None:
    angles = np.random.default_rng(2).uniform(-3, 3, (16, 4)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((2, 5, 2, 8))
    results = []
    for lowering in (NativeGraph, PluginGraph):
        with WeightFile(tmp_path / f"{lowering.__name__}.bin") as sink:
            g = lowering("one", sink, floats)
            tables = g.constant("c", np.cos(angles)), g.constant("s", np.sin(angles))
            at = replace(one_attention(g, "T", 5), rotary=tables)
            rows = g.input("x", floats, ["N", "T", 2, 8])
            if isinstance(g, NativeGraph):
                by_head = g.op("Transpose", [rows], ["by_head"], perm=[0, 2, 1, 3])
                rotated = g._rotated(by_head, *(g._angles(table) for table in at.rotary))
                y = g.op("Transpose", [rotated], ["y"], perm=[0, 2, 1, 3])
            else:
                assert isinstance(g, PluginGraph)
                y = g._rotate(rows, at)
            g.output(y, floats, ["N", "T", 2, 8])
        positions = np.array([[0, 1, 2, 2, 3], [7, 8, 9, 9, 15]], np.int32)
        results.append(run(without_unused_outputs(g.model()), floats, x, {names.POSITIONS: positions}))
    np.testing.assert_allclose(results[0], results[1], rtol=2 * steps, atol=steps)


def run(model: ModelProto, floats: str, x: NDArray[Any], others: dict[str, NDArray[Any]] | None = None) -> NDArray[Any]:
    session = ort.InferenceSession(model.SerializeToString())
    known = {"x": x.astype(floats), **(others or {})}
    feed = {i.name: known.get(i.name, np.zeros(2, np.int32)) for i in session.get_inputs() if i.name != names.TREE_MASK}
    if len(session.get_inputs()) > len(feed):
        feed[names.TREE_MASK] = np.zeros((2, 5, 1), np.int32)
    (y,) = session.run(None, feed)
    return y


@pytest.mark.parametrize("mode", list(MaskMode))
def test_the_body_is_what_the_kernels_compute(mode: MaskMode) -> None:
    """The stand-in for the plugin against the reference the kernels are tested against."""
    rng = np.random.default_rng(5)
    n, t, heads, kv, d, slots, s = 2, 37, 4, 2, 8, 3, 64
    q, k, v = (rng.standard_normal((n, t, rows, d)).astype(np.float32) for rows in (heads, kv, kv))
    past_k, past_v = (rng.standard_normal((slots, kv, s, d)).astype(np.float32) for _ in range(2))
    parents = np.array([-1, *(int(rng.integers(i)) for i in range(1, t))], np.int32)
    mask = np.stack([packed_mask(parents, 2), packed_mask(parents[::-1] * 0 - 1, 2)])
    slot_ids, past_len = np.array([2, 0], np.int32), np.array([11, 0], np.int32)
    scale = 0.37
    expected = attention(q, k, v, past_k, past_v, slot_ids, past_len, mask, mode, scale)
    attrs: dict[str, Any] = dict.fromkeys(plugins.ATTENTION_ATTRIBUTES, 1) | {plugins.SCALE: scale}
    inputs = [f"x{i}" for i in range(8)]
    node = helper.make_node(
        plugins.ATTENTION, inputs, ["a", "b", "c"], domain="ddtree", plugin_namespace="", plugin_version="", **attrs
    )
    kinds = [TensorProto.FLOAT] * 5 + [TensorProto.INT32] * 3
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(inputs, kinds, strict=True)]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "abc"]
    graph = helper.make_graph([node], "one", values, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ddtree", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[attention_body(mode)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip(inputs, [q, k, v, past_k, past_v, slot_ids, past_len, mask], strict=True)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
