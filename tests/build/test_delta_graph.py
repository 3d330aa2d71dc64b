"""A gated delta net as matrix products, run by ONNX Runtime's own operators, against its recurrence where that is hard;
trees of whole networks are compared by `test_numerics_target`."""

from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from delta_truth import State, Weights, random_net, random_weights, walk
from onnx import TensorProto, numpy_helper

from ddtree_trt.build.graph import delta
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph
from ddtree_trt.build.graph.ops import Delta
from ddtree_trt.models.delta import DeltaNet

ROWS = 256
Array = np.ndarray


class _Inline:
    """Weights inside of the graph."""

    def add(self, key: str, make: Any, dtype: str) -> TensorProto:
        return numpy_helper.from_array(make(), key)


def run(g: NativeGraph, feeds: dict[str, Array], outputs: list[str]) -> list[Any]:
    for name in outputs:
        g.output(name, "float32", [f"{name}.{axis}" for axis in range(4 if "new" in name else 3)])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(g.model().SerializeToString(), options).run(outputs, feeds)


def chain_pass(d: DeltaNet, w: Weights, rows: Array, past: State) -> list[Any]:
    """Results and what a commit needs of a chain of rows."""
    g, count = NativeGraph("delta", _Inline(), "float32"), len(rows)
    feeds = {
        "projected": rows[None],
        "sources": (np.arange(count)[:, None] + np.arange(d.taps))[None],
        "seen": np.tri(count, dtype=bool)[None],
        "state": past.heads[None].astype(np.float32),
        "inputs": past.inputs[None].astype(np.float32),
    }
    for name, value in feeds.items():
        g.input(name, str(value.dtype), value.shape)
    conv, decay, bias, norm = (g.weight(n, partial(getattr, w, n)) for n in ("conv", "decay", "step_bias", "head_norm"))
    tree = delta.Tree("sources", "seen", ROWS + 1)
    delta.delta_net(g, "projected", Delta(0, d, conv, decay, bias, norm, w.eps), tree, ("state", "inputs"), "o", "kept")
    return [found[0] for found in run(g, feeds, ["o", "kept"])]


def committed(d: DeltaNet, past: State, kept: Array, window: int) -> Array:
    """The state behind a whole chain, which a commit advances by so many rows at a time."""
    values: list[Any] = [past.heads[None].astype(np.float32), past.inputs[None, None].astype(np.float32)]
    for start in range(0, len(kept), window):
        taken = np.full(window, -1, np.int32)
        taken[: len(kept) - start] = np.arange(start, min(start + window, len(kept)))
        feeds = {"state": values[0], "inputs": values[1], "kept": kept, "taken": taken}
        feeds["before"] = np.array([start - 1], np.int32)
        g = NativeGraph("advance", _Inline(), "float32")
        for name, value in feeds.items():
            g.input(name, str(value.dtype), value.shape)
        delta.advance(g, ("state", "inputs"), "kept", ("taken", "before"), d, ("new_state", "new_inputs"))
        values = run(g, feeds, ["new_state", "new_inputs"])
    return np.asarray(values[0][0])


@pytest.mark.parametrize("alike", [True, False])
def test_long_chains(alike: bool) -> None:
    """Of random rows behind a state; and of equal rows without decays: powers of A, whose sum is the inverse, reach
    10^75 in it."""
    rng = np.random.default_rng(3)
    d = random_net(rng)
    w, past = random_weights(rng, d), State.empty(d)
    rows = rng.standard_normal((ROWS, sum(d.projected_widths))).astype(np.float32)
    if alike:
        w = Weights(w.conv, np.full_like(w.decay, -1e-6), w.step_bias, w.head_norm)
        rows[:] = rows[0]
        rows[:, -2 * d.value_heads : -d.value_heads] = 9  # steps of almost 1
    else:
        past = walk(d, w, rng.standard_normal(rows.shape), range(-1, ROWS - 1), past)[1][-1]
    out, kept = chain_pass(d, w, rows, past)
    expected, states = walk(d, w, rows, range(-1, ROWS - 1), past)
    for found, right, bound in ((out, expected, 1e-4), (committed(d, past, kept, 15), states[-1].heads, 1e-5)):
        assert np.abs(found - right).max() < bound * np.abs(right).max()
