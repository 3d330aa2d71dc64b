"""The graph that compacts an engine's cache, of either lowering, in ONNX Runtime against what the kernel computes; and
the windows in which the run time gives it a path."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import compact
from lowered import Session

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.build.graph.compaction import compaction_graph, window_rows
from ddtree_trt.device.buffers import CacheShape
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.tensorrt.compaction import windows

TARGET = TransformerDims(96, 32, 2, 4, 2, 8, 48, 1e-6, 1e4, 512)
DRAFTER = DFlashDims(96, 32, 1, 4, 2, 8, 48, 1e-6, 1e4, 512, 6, 3, (0, 1), 2)
LIMITS = Limits(max_seq_len=24, max_batch=3, max_tree_budget=15, prefill_chunk=8)
SHAPE = CacheShape.of(TARGET, LIMITS, 4)
WINDOW = window_rows(DRAFTER)
LAST = LIMITS.cache_rows - 1
NO_WEIGHTS: Any = None
ATTENTIONS = ["native", "plugin"]


class Compaction:
    """The graph, bound to one slot of a cache [planes, slots, Hkv, S, D] at a time as the run time does."""

    def __init__(self, folder: Any, attention: AttentionName) -> None:
        graph = compaction_graph(NO_WEIGHTS, TARGET, LIMITS, "fp32", WINDOW, attention)
        onnx.checker.check_model(graph, full_check=True)
        self.native, self.session = attention == "native", Session(folder / "move.onnx", graph).session
        shape = (SHAPE.planes, SHAPE.stored_slots, *SHAPE.slot_shape)
        self.cache = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def move(self, slot: int, past: int, path: list[int]) -> None:
        for *_, start, keep in windows(past, np.array(path, np.int32), WINDOW, LIMITS.cache_rows):
            feed: dict[str, Any] = {names.PAST_LEN: np.array([start], np.int32)}
            if self.native:
                pasts, presents = (names.plane_names(part, TARGET.num_layers) for part in ("past", "present"))
                feed |= {names.KEEP: keep, **dict(zip(pasts, self.cache[:, slot : slot + 1], strict=True))}
                self.cache[:, slot] = np.concatenate(self.session.run(presents, feed))
            else:
                feed |= {names.KEEP: keep[None], names.SLOT_IDS: np.array([slot], np.int32)}
                (self.cache,) = self.session.run([names.PRESENT_CACHE], {**feed, names.PAST_CACHE: self.cache})


@pytest.fixture(scope="module", params=ATTENTIONS)
def compaction(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compaction:
    return Compaction(tmp_path_factory.mktemp("graph"), request.param)


def check(compaction: Compaction, slot: int, past: int, path: list[int]) -> None:
    one = [np.array([value], np.int32) for value in (slot, past, len(path))]
    expected = compact(compaction.cache, one[0], one[1], np.array([path], np.int32), one[2])
    compaction.move(slot, past, path)
    # What is behind the path is no one's: native windows may copy it.
    kept = np.ones(expected.shape[3], bool)
    kept[past + len(path) :] = False
    np.testing.assert_array_equal(compaction.cache[..., kept, :], expected[..., kept, :])
    others = [n for n in range(expected.shape[1]) if n != slot]
    np.testing.assert_array_equal(compaction.cache[:, others], expected[:, others])


@pytest.mark.parametrize(
    ("past", "path"),
    [
        (5, [0, 2, 3]),
        (0, [1, 2, 3, 4, 5, 6]),
        (24, [0, 15]),  # the last row that a tree can have
        (LAST - 5, [0, 1, 2, 3, 5]),  # the window ends with the cache
        (4, [0, 1, 3, 4, 5, 7, 9, 10, 11, 14, 15]),  # of several windows
        (LAST - 9, [0, 1, 2, 3, 4, 5, 7, 9]),  # the last of them begins earlier
    ],
)
def test_rows_move_as_the_kernel_moves_them(compaction: Compaction, past: int, path: list[int]) -> None:
    for slot in (0, 2):
        check(compaction, slot, past, path)


@settings(max_examples=40)
@given(st.data(), st.integers(0, LIMITS.max_seq_len), st.integers(0, LIMITS.max_batch - 1))
def test_any_path(compaction: Compaction, data: st.DataObject, past: int, slot: int) -> None:
    check(compaction, slot, past, sorted({0, *data.draw(st.sets(st.integers(1, LIMITS.max_tree_budget)))}))
