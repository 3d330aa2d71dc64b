"""A gated delta net as matrix products, run by ONNX Runtime's own operators, against its recurrence."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from delta_truth import State, Weights, path_to, random_net, random_parents, random_weights, walk
from onnx import ModelProto, TensorProto, numpy_helper

from ddtree_trt.build.graph import delta
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph
from ddtree_trt.build.graph.ops import Delta
from ddtree_trt.models.delta import DeltaNet

MOST = 257


class _Inline:
    """Weights inside of the graph."""

    def add(self, key: str, make: Any, dtype: str) -> TensorProto:
        return numpy_helper.from_array(make(), key)


def build(d: DeltaNet, w: Weights, most: int = MOST) -> ModelProto:
    """The graph of a pass."""
    g = NativeGraph("delta", _Inline(), "float32")
    projected = g.input("projected", "float32", ["N", "T", sum(d.projected_widths)])
    tree = delta.Tree(g.input("sources", "int64", ["N", "T", d.taps]), g.input("seen", "bool", ["N", "T", "T"]), most)
    state = g.input("state", "float32", ["N", d.value_heads, d.key_dim, d.value_dim])
    inputs = g.input("inputs", "float32", ["N", d.taps - 1, d.channels])
    parts = (g.weight(n, partial(getattr, w, n)) for n in ("conv", "decay", "step_bias", "head_norm"))
    conv, decay, bias, norm = parts
    at = Delta(0, d, conv, decay, bias, norm, w.eps)
    delta.delta_net(g, projected, at, tree, (state, inputs), "out", "kept")
    for name in ("out", "kept"):
        g.output(name, "float32", ["N", "T", "any"])
    return g.model()


def commit(d: DeltaNet, past: State, kept: np.ndarray, path: list[int], window: int) -> tuple[np.ndarray, np.ndarray]:
    """State and last inputs that the graph of a commit makes of a pass's rows [T, …], so many of a path at a time."""
    g = NativeGraph("advance", _Inline(), "float32")
    state = g.input("state", "float32", [1, d.value_heads, d.key_dim, d.value_dim])
    inputs = g.input("inputs", "float32", [1, 1, d.taps - 1, d.channels])
    rows = g.input("taken", "int32", [window]), g.input("before", "int32", [1])
    of_pass = g.input("kept", "float32", list(kept.shape))
    delta.advance(g, (state, inputs), of_pass, rows, d, ("new_state", "new_inputs"))
    g.output("new_state", "float32", [1, d.value_heads, d.key_dim, d.value_dim])
    g.output("new_inputs", "float32", [1, 1, d.taps - 1, d.channels])
    session = session_of(g.model())
    values: list[Any] = [past.heads[None].astype(np.float32), past.inputs[None, None].astype(np.float32)]
    for start in range(0, len(path), window):
        taken = np.full(window, -1, np.int32)
        taken[: len(path[start : start + window])] = path[start : start + window]
        before = np.array([path[start - 1] if start else -1], np.int32)
        feeds = {"state": values[0], "inputs": values[1], "taken": taken, "before": before, "kept": kept}
        values = session.run(["new_state", "new_inputs"], feeds)
    return values[0][0], values[1][0, 0]


def session_of(model: ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options)


def sources_of(parents: Sequence[int], taps: int) -> np.ndarray:
    """int64 [T, taps]: of each row, in the past's inputs and the call's."""
    found = []
    for node in range(len(parents)):
        rows = [*range(taps - 1), *(taps - 1 + n for n in path_to(parents, node))]
        found.append(rows[-taps:])
    return np.array(found, np.int64)


def run(model: ModelProto, d: DeltaNet, trees: list[list[int]], rows: np.ndarray, past: list[State]) -> Any:
    """The outputs of N trees of T nodes each."""
    seen = np.zeros((len(trees), len(trees[0]), len(trees[0])), bool)
    for n, parents in enumerate(trees):
        for node in range(len(parents)):
            seen[n, node, path_to(parents, node)] = True
    feeds = {
        "projected": rows,
        "sources": np.stack([sources_of(parents, d.taps) for parents in trees]),
        "seen": seen,
        "state": np.stack([s.heads for s in past]).astype(np.float32),
        "inputs": np.stack([s.inputs for s in past]).astype(np.float32),
    }
    return session_of(model).run(None, feeds)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("nodes", "share"), [(1, 1), (2, 2), (5, 3), (17, 1), (100, 2), (MOST, 3)])
def test_trees_behind_states(nodes: int, share: int) -> None:
    """Two slots, one of which is empty: results, and states behind a leaf each; then once more behind those."""
    rng = np.random.default_rng(nodes + 1000 * share)
    d = random_net(rng, share=share)
    w = random_weights(rng, d)
    model, past = build(d, w), [State.empty(d), State.empty(d)]
    for _ in range(2):
        trees = [random_parents(rng, nodes), random_parents(rng, nodes, 256)]
        rows = rng.standard_normal((2, nodes, sum(d.projected_widths))).astype(np.float32)
        out, kept = run(model, d, trees, rows, past)
        for n, parents in enumerate(trees):
            expected, states = walk(d, w, rows[n], parents, past[n])
            assert error(out[n], expected) < 1e-4
            last = int(rng.integers(nodes))
            state, inputs = commit(d, past[n], kept[n], path_to(parents, last), window=5)
            past[n] = states[last]
            assert error(state, past[n].heads) < 2e-6 and error(inputs, past[n].inputs) < 1e-6


def test_rows_that_are_alike() -> None:
    """A chain of equal rows without decays: powers of A, whose sum is the inverse, reach 10^75 in it."""
    rng = np.random.default_rng(3)
    d = random_net(rng)
    w = random_weights(rng, d)
    w = Weights(w.conv, np.full_like(w.decay, -1e-6), w.step_bias, w.head_norm)
    rows = np.repeat(rng.standard_normal((1, 1, sum(d.projected_widths))).astype(np.float32), 256, 1)
    rows[..., -2 * d.value_heads : -d.value_heads] = 9  # steps of almost 1
    parents = list(range(-1, 255))
    out, kept = run(build(d, w), d, [parents], rows, [State.empty(d)])
    expected, states = walk(d, w, rows[0], parents, State.empty(d))
    state, _ = commit(d, State.empty(d), kept[0], list(range(256)), window=16)
    assert error(out[0], expected) < 1e-4 and error(state, states[-1].heads) < 1e-5
