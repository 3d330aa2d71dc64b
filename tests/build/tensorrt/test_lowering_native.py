"""The native TensorRT lowering in ONNX Runtime: its mask against its
definition, and its operators of opset 24 against their spelled-out forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.build.graph.ops import Attention
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.models.decoder import TransformerDims

LIMITS = Limits(max_seq_len=128, max_batch=3, max_tree_budget=40, prefill_chunk=48)
DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 256}


def one_attention(g: TensorRtGraph, tokens: str, tree: int) -> Attention:
    """A graph's inputs for `tokens` rows of at most `tree`, over one layer's cache of 64 + `tree` rows."""
    g.row_inputs(tokens, tree, masked=True)
    dims = TransformerDims(96, 32, 1, 2, 1, 8, 48, 1e-6, 1e4, 64)
    (cache,) = g.cache(dims, Limits(max_seq_len=64, max_tree_budget=tree - 1, prefill_chunk=tree))
    return Attention(*cache, ("cos", "sin"), (2, 1), 8)


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
