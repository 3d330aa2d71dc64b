"""A gated delta net as matrix products, run by ONNX Runtime's own operators, against its recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from delta_truth import State, Weights, path_to, random_net, random_parents, random_weights, walk
from onnx import ModelProto, TensorProto, numpy_helper

from ddtree_trt.build.graph import delta
from ddtree_trt.build.graph.lowering_onnxruntime import OnnxRuntimeGraph
from ddtree_trt.build.graph.ops import Delta
from ddtree_trt.models.delta import DeltaNet

MOST = 257


class _Inline:
    """Weights inside of the graph."""

    def add(self, key: str, make: Any, dtype: str) -> TensorProto:
        return numpy_helper.from_array(make(), key)


def build(d: DeltaNet, w: Weights, most: int = MOST) -> ModelProto:
    g = OnnxRuntimeGraph("delta", _Inline())
    projected = g.input("projected", "float32", ["N", "T", sum(d.projected_widths)])
    tree = delta.Tree(
        g.input("sources", "int64", ["N", "T", d.taps]), g.input("paths", "float32", ["N", "T", "T"]), most
    )
    state = g.input("state", "float32", ["N", d.value_heads, d.key_dim, d.value_dim])
    inputs = g.input("inputs", "float32", ["N", d.taps - 1, d.channels])
    parts = (g.weight(n, partial(getattr, w, n)) for n in ("conv", "decay", "step_bias", "head_norm"))
    conv, decay, bias, norm = parts
    at = Delta(0, d, conv, decay, bias, norm, w.eps)
    done = delta.delta_net(g, projected, at, tree, (state, inputs), "out")
    path = g.input("last", "int64", ["N"]), g.input("next", "int64", ["N", d.taps - 1])
    moved = delta.committed(g, done, state, path, "commit")
    for name in ("out", *moved):
        g.output(name, "float32", [])
    return g.model()


def sources_of(parents: Sequence[int], taps: int) -> np.ndarray:
    """int64 [T, taps]: of each row, in the past's inputs and the call's."""
    found = []
    for node in range(len(parents)):
        rows = [*range(taps - 1), *(taps - 1 + n for n in path_to(parents, node))]
        found.append(rows[-taps:])
    return np.array(found, np.int64)


def run(
    model: ModelProto, d: DeltaNet, trees: list[list[int]], rows: np.ndarray, past: list[State], last: list[int]
) -> Any:
    """The outputs of N trees of T nodes each."""
    paths = np.zeros((len(trees), len(trees[0]), len(trees[0])), np.float32)
    for n, parents in enumerate(trees):
        for node in range(len(parents)):
            paths[n, node, path_to(parents, node)] = 1
    sources = np.stack([sources_of(parents, d.taps) for parents in trees])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    feeds = {
        "projected": rows,
        "sources": sources,
        "paths": paths,
        "state": np.stack([s.heads for s in past]).astype(np.float32),
        "inputs": np.stack([s.inputs for s in past]).astype(np.float32),
        "last": np.array(last, np.int64),
        "next": np.stack([s[node, 1:] for s, node in zip(sources, last, strict=True)]),
    }
    return session.run(None, feeds)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 17, 64, 100, MOST])
@pytest.mark.parametrize("share", [1, 2, 3])
def test_trees_behind_states(nodes: int, share: int) -> None:
    """Two slots, one of which is empty: results, and states behind a leaf each; then once more behind those."""
    rng = np.random.default_rng(nodes + 1000 * share)
    d = random_net(rng, share=share)
    w = random_weights(rng, d)
    model, past = build(d, w), [State.empty(d), State.empty(d)]
    for _ in range(2):
        trees = [random_parents(rng, nodes), random_parents(rng, nodes, 256)]
        rows = rng.standard_normal((2, nodes, sum(d.projected_widths))).astype(np.float32)
        last = rng.integers(0, nodes, 2).tolist()
        out, state, inputs = run(model, d, trees, rows, past, last)
        for n, parents in enumerate(trees):
            expected, states = walk(d, w, rows[n], parents, past[n])
            past[n] = states[last[n]]
            assert error(out[n], expected) < 1e-4
            assert error(state[n], past[n].heads) < 2e-6 and error(inputs[n], past[n].inputs) < 1e-6


def test_rows_that_are_alike() -> None:
    """A chain of equal rows without decays: powers of A, whose sum is the inverse, reach 10^75 in it."""
    rng = np.random.default_rng(3)
    d = random_net(rng)
    w = random_weights(rng, d)
    w = Weights(w.conv, np.full_like(w.decay, -1e-6), w.step_bias, w.head_norm)
    rows = np.repeat(rng.standard_normal((1, 1, sum(d.projected_widths))).astype(np.float32), 256, 1)
    rows[..., -2 * d.value_heads : -d.value_heads] = 9  # steps of almost 1
    parents = list(range(-1, 255))
    out, state, _ = run(build(d, w), d, [parents], rows, [State.empty(d)], [255])
    expected, states = walk(d, w, rows[0], parents, State.empty(d))
    assert error(out[0], expected) < 1e-4 and error(state[0], states[-1].heads) < 1e-5


def test_a_pass_has_no_loop_over_nodes() -> None:
    """The graph is the same for every T: ⌈log₂ T⌉ doublings of the inverse, the first without a product."""
    rng = np.random.default_rng(0)
    d = random_net(rng)
    w = random_weights(rng, d)
    kinds = {most: [node.op_type for node in build(d, w, most).graph.node] for most in (1, 2, 17, 33, MOST)}
    assert not {"Loop", "Scan", "If"} & {*kinds[MOST]}
    products = {most: found.count("MatMul") for most, found in kinds.items()}
    around = products[1]
    assert products == {1: around, 2: around + 1, 17: around + 9, 33: around + 11, MOST: around + 17}
