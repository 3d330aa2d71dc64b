"""`DDTreeDeltaNet` in ONNX Runtime and the commit of its states, against the recurrence; and what they promise beyond:
trees, chains, single tokens, batches and threads give the same bits.

`DDTREE_CPU_ISA` chooses the instruction set when the library is loaded; `test_cpu_attention` runs this with the others.
"""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from delta_truth import State, path_to, random_net, random_parents, random_weights, walk
from onnx import TensorProto, helper

from ddtree_trt import _native
from ddtree_trt.runtime.engines.onnxruntime.network import session_options

TYPES = {"projected": 1, "conv": 1, "decay": 1, "step_bias": 1, "head_norm": 1}
TYPES |= {"slots": 7, "parents": 6, "states": 1, "moves": 1}
SLOTS = 3


class Layer:
    """The second of two layers, and the states of its slots beside the truth's."""

    def __init__(self, seed: int, threads: int = 1, **net: int) -> None:
        rng = np.random.default_rng(seed)
        self.d = d = random_net(rng, **net)
        self.w = random_weights(rng, d)
        self.heads = {n: getattr(d, n) for n in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")}
        self.states = np.zeros((2, SLOTS, d.state_values), np.float32)
        self.truth = [State.empty(d) for _ in range(SLOTS)]
        self.moves = np.empty((2, 0, d.moved_values), np.float32)
        node = helper.make_node(
            "DDTreeDeltaNet", [*TYPES], ["out"], None, None, "ddtree", **self.heads, layer=1, epsilon=self.w.eps
        )
        ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in TYPES.items()]
        graph = helper.make_graph([node], "g", ends, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ddtree", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        self.session = ort.InferenceSession(model.SerializeToString(), session_options(threads))

    def run(self, trees: list[tuple[int, list[int], np.ndarray]], **changed: Any) -> list[np.ndarray]:
        """Results by tree: slot, parents, rows."""
        rows = np.concatenate([rows for *_, rows in trees])
        self.moves = np.empty((2, len(rows), self.d.moved_values), np.float32)
        feeds = {
            "projected": rows[None],
            **{name: getattr(self.w, name) for name in ("conv", "decay", "step_bias", "head_norm")},
            "slots": np.array([(slot, 0, 0, 0, len(parents)) for slot, parents, _ in trees], np.int64),
            "parents": np.array([p for _, parents, _ in trees for p in parents], np.int32),
            "states": self.states,
            "moves": self.moves,
            **changed,
        }
        binding = self.session.io_binding()
        for name, array in feeds.items():  # bound, because moves are written in place
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
        binding.bind_output("out")
        self.session.run_with_iobinding(binding)
        (out,) = binding.copy_outputs_to_cpu()
        return np.split(out[0], np.cumsum([len(parents) for _, parents, _ in trees])[:-1])

    def commit(self, slot: int, rows: list[int]) -> None:
        self.moves[0] = 0  # of the first layer, which no operator has written
        _native.commit_delta(self.states, self.moves, slot, np.array(rows, np.int32), **self.heads)

    def random_tree(self, rng: np.random.Generator, slot: int, nodes: int) -> tuple[int, list[int], np.ndarray]:
        rows = rng.standard_normal((nodes, sum(self.d.projected_widths))).astype(np.float32)
        return slot, random_parents(rng, nodes), rows


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_several_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes: tuple[dict[str, int], ...] = (
        {},
        {"share": 1, "value_dim": 16},
        {"share": 3, "key_dim": 16, "value_dim": 128},
        {"value_dim": 272},
    )
    layer = Layer(seed, 1 + seed % 2, **shapes[seed % 4])
    for _ in range(4):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
        trees = [layer.random_tree(rng, slot, int(rng.choice([1, 2, 17, 60, 257]))) for slot in slots]
        start = 0
        for found, (slot, parents, rows) in zip(layer.run(trees), trees, strict=True):
            expected, states = walk(layer.d, layer.w, rows, parents, layer.truth[slot])
            assert error(found, expected) < 1e-4
            path = path_to(parents, int(rng.integers(len(parents))))
            layer.commit(slot, [start + node for node in path])
            layer.truth[slot] = states[path[-1]]
            assert error(layer.states[1, slot], layer.truth[slot].flat()) < 2e-6
            start += len(parents)


@pytest.mark.parametrize("seed", range(3))
def test_a_path_has_the_bits_of_single_tokens(seed: int) -> None:
    """Beside other slots, on any number of threads; and so have the states that its commit leaves."""
    rng = np.random.default_rng(100 + seed)
    layer, alone = Layer(seed, 1 + seed % 3), Layer(seed)
    for _ in range(3):
        trees = [layer.random_tree(rng, slot, int(rng.integers(1, 130))) for slot in rng.permutation(SLOTS)]
        start = 0
        for found, (slot, parents, rows) in zip(layer.run(trees), trees, strict=True):
            path = path_to(parents, int(rng.integers(len(parents))))
            for node in path:
                (single,) = alone.run([(slot, [-1], rows[[node]])])
                np.testing.assert_array_equal(single[0], found[node])
                alone.commit(slot, [0])
            layer.commit(slot, [start + node for node in path])
            np.testing.assert_array_equal(layer.states, alone.states)
            start += len(parents)


def test_what_does_not_fit_is_refused() -> None:
    layer, rng = Layer(0), np.random.default_rng(0)
    tree = layer.random_tree(rng, 0, 3)
    for changed, message in (
        ({"parents": np.array([-1, 0, 2], np.int32)}, "parents are not those of trees"),
        ({"slots": np.array([[SLOTS, 0, 0, 0, 3]], np.int64)}, f"rows of slot {SLOTS} are not"),
        ({"slots": np.array([[0, 0, 1, 0, 2]], np.int64)}, "rows of slot 0 are not"),
        ({"slots": np.array([[0, 0, 0, 0, 2]], np.int64)}, "more rows than the slots"),
        ({"slots": np.array([[0, 0, 0, 0, 4]], np.int64)}, "rows of slot 0 are not"),
        ({"moves": np.empty((2, 2, layer.d.moved_values), np.float32)}, "states or moves have another shape"),
        ({"states": layer.states[:1]}, "states or moves have another shape"),
        ({"conv": layer.w.conv[:-1]}, "do not fit the heads"),
    ):
        with pytest.raises(Exception, match=message):
            layer.run([tree], **changed)
    for rows, message in (([3], "rows must be those of moves"), ([-1], "rows must be those of moves")):
        layer.run([tree])
        with pytest.raises(ValueError, match=message):
            layer.commit(0, rows)
    with pytest.raises(ValueError, match="states and moves must fit the heads and the slot"):
        layer.commit(SLOTS, [0])
