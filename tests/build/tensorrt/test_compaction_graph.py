"""The graph that compacts a native engine's cache, in ONNX Runtime against what the kernel computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.compaction import compaction_graph, window_rows
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins.reference import compact

TARGET = TransformerDims(96, 32, 2, 4, 2, 8, 48, 1e-6, 1e4, 512)
DRAFTER = DFlashDims(96, 32, 1, 4, 2, 8, 48, 1e-6, 1e4, 512, 6, 3, (0, 1), 2)
LIMITS = Limits(max_seq_len=24, max_batch=3, max_tree_budget=15, prefill_chunk=8)
WINDOW = window_rows(DRAFTER)


class Compaction:
    """A cache [planes, slots, Hkv, S, D] and the graph, bound to one slot at a time, in place as the run time does."""

    def __init__(self, seed: int) -> None:
        self.graph = compaction_graph(TARGET, LIMITS, "float32", WINDOW)
        onnx.checker.check_model(self.graph, full_check=True)
        self.session = ort.InferenceSession(self.graph.SerializeToString(), providers=["CPUExecutionProvider"])
        shape = (2 * TARGET.num_layers, LIMITS.max_batch, TARGET.num_kv_heads, LIMITS.cache_rows, TARGET.head_dim)
        self.cache = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def move(self, slot: int, past: int, keep: NDArray[np.int32]) -> None:
        """One execution. `keep` [K], its padding included."""
        feed = {"past_len": np.array([past], np.int32), "keep": keep}
        feed |= {name: plane[slot : slot + 1] for name, plane in zip(self.pasts, self.cache, strict=True)}
        presents = self.session.run(names.present_names(TARGET.num_layers), feed)
        for plane, present in zip(self.cache, presents, strict=True):
            plane[slot] = present[0]

    @property
    def pasts(self) -> list[str]:
        return names.past_names(TARGET.num_layers)


def padded(path: list[int], start: int = 0) -> NDArray[np.int32]:
    """One window of a path, from entry `start` on; what is behind the path stays."""
    keep = np.arange(WINDOW, dtype=np.int32)
    window = path[start : start + WINDOW]
    keep[: len(window)] = np.array(window, np.int32) - start
    return keep


def truth(cache: NDArray[np.float32], slot: int, past: int, path: list[int]) -> NDArray[np.float32]:
    """The kernel's result."""
    one = [np.array([value], np.int32) for value in (slot, past, len(path))]
    kept = np.array([path or [0]], np.int32)
    result: NDArray[np.float32] = compact(cache, one[0], one[1], kept, one[2])
    return result


LAST = LIMITS.cache_rows - 1


@pytest.mark.parametrize(
    ("past", "path"),
    [
        (5, []),
        (5, [0]),
        (5, [0, 1, 2]),
        (5, [0, 2, 3]),
        (5, [0, 3, 4, 9, 15]),
        (0, [1, 2, 3, 4, 5, 6]),
        (0, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 10]),
        (24, [0, 15]),  # the last row that a tree can have
        (LAST - 5, [0, 1, 2, 3, 5]),  # the window ends with the cache
    ],
)
@pytest.mark.parametrize("slot", [0, 2])
def test_rows_move_as_the_kernel_moves_them(past: int, path: list[int], slot: int) -> None:
    run = Compaction(past + len(path))
    expected = truth(run.cache, slot, past, path)
    run.move(slot, past, padded(path))
    np.testing.assert_array_equal(run.cache, expected)


def test_any_path() -> None:
    rng, run = np.random.default_rng(0), Compaction(1)
    for _ in range(60):
        past, slot = int(rng.integers(0, LIMITS.max_seq_len)), int(rng.integers(0, LIMITS.max_batch))
        path = sorted(rng.choice(np.arange(1, 16), rng.integers(0, WINDOW), replace=False).tolist())
        expected = truth(run.cache, slot, past, [0, *path])
        run.move(slot, past, padded([0, *path]))
        np.testing.assert_array_equal(run.cache, expected)


def test_a_path_longer_than_a_window_takes_several() -> None:
    path = [0, 1, 3, 4, 5, 7, 9, 10, 11, 14, 15]
    assert WINDOW < len(path) <= 2 * WINDOW
    run = Compaction(2)
    expected = truth(run.cache, 1, 4, path)
    for start in range(0, len(path), WINDOW):
        run.move(1, 4 + start, padded(path, start))
    np.testing.assert_array_equal(run.cache, expected)


def test_a_last_window_that_would_not_fit_begins_earlier() -> None:
    run, past, path = Compaction(3), LAST - 9, [0, 1, 2, 3, 4, 5, 7, 9]
    expected = truth(run.cache, 1, past, path)
    run.move(1, past, padded(path))
    start = LIMITS.cache_rows - WINDOW - past
    assert 0 < start < WINDOW, "the second window begins in the first"
    keep = np.arange(WINDOW, dtype=np.int32)
    keep[WINDOW - start : len(path) - start] = np.array(path[WINDOW:]) - start
    run.move(1, past + start, keep)
    np.testing.assert_array_equal(run.cache, expected)


def test_the_window_is_the_longest_chain() -> None:
    assert window_rows(DRAFTER) == DRAFTER.block_size
    assert window_rows(TARGET) == 17  # an autoregressive drafter's longest chain and the root


@pytest.mark.parametrize("floats", ["bfloat16", "float16"])
def test_halves_are_moved_bit_for_bit(floats: str) -> None:
    graph = compaction_graph(TARGET, LIMITS, floats, WINDOW)
    onnx.checker.check_model(graph, full_check=True)
    assert {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.graph.input}["keep"] == [WINDOW]
    assert all(not d.dim_param for i in graph.graph.input for d in i.type.tensor_type.shape.dim)
    assert {o.type.tensor_type.elem_type for o in graph.graph.output} == {getattr(onnx.TensorProto, floats.upper())}
    assert [node.op_type for node in graph.graph.node].count("Cast") == 1, "of the length alone"
