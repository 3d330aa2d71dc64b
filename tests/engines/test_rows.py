"""Rows of logits: what a prefill returns on every backend, and rows that stay on a device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_pair
from drafts import marginals
from engine_builds import PACKAGED, build_engine, build_torch_engine
from fake_trt_engine import Lowerings
from scripted import ScriptedEngine
from scripted_models import Good, MarkovTarget

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine, LogitRows
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.passes import LazyRows

BACKENDS = ("onnxruntime", "torch", "tensorrt", "scripted")


def scripted() -> ScriptedEngine:
    return ScriptedEngine(MarkovTarget(64), Good(MarkovTarget(64)))


@pytest.fixture(scope="module")
def lowerings(small_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Lowerings:
    """With our plugin alone."""
    return Lowerings.packaged(tmp_path_factory.mktemp("lowered"), small_engine)


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    def torch() -> Engine:
        return build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", max_seq_len=64)

    makers: dict[str, Callable[[], Engine]] = {
        "onnxruntime": lambda: open_engine(request.getfixturevalue("small_engine"), threads=1),
        "torch": torch,
        "tensorrt": lambda: open_engine(request.getfixturevalue("machine").directory),
        "scripted": scripted,
    }
    made = makers[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize(("rows", "count"), [("all", 5), ("last", 1), ("none", 0)])
def test_a_prefill_returns_the_rows_it_is_asked_for(engine: Engine, rows: LogitRows, count: int) -> None:
    """And no row more: every backend, and what stands for one, means the same."""
    tokens = np.array([5, 6, 7, 8, 9], np.int64)
    verdict = engine.prefill(0, tokens, rows=rows, taps=True)
    vocab = engine.manifest.target_dims.vocab_size
    logits = np.asarray(verdict.logits)
    assert verdict.choices.shape == (count,) and verdict.choices.dtype == np.int64
    assert len(verdict.logits) == count and logits.shape == (count, vocab) and logits.dtype == np.float32
    assert verdict.choices.tolist() == logits.argmax(-1).tolist()
    assert engine.length(0) == engine.draftable(0, 99) == 5
    if count:
        np.testing.assert_array_equal(verdict.logits[-1], logits[-1])
        np.testing.assert_array_equal(verdict.logits[0], logits[0])
        assert [verdict.logits[-1, t] for t in (0, 7, vocab - 1)] == logits[-1, [0, 7, vocab - 1]].tolist()
    with pytest.raises(IndexError):
        verdict.logits[count]


def test_lazy_rows_fetch_what_is_read() -> None:
    fetched: list[tuple[int, int, slice]] = []
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)

    def fetch(start: int, stop: int, columns: slice) -> Any:
        fetched.append((start, stop, columns))
        return whole[start:stop, columns].copy()

    rows = LazyRows(4, 3, fetch)
    assert len(rows) == 4 and not fetched
    np.testing.assert_array_equal(rows[2], whole[2])
    np.testing.assert_array_equal(rows[-1], whole[3])
    assert fetched == [(2, 3, slice(None)), (3, 4, slice(None))]
    assert rows[-1, 2] == whole[3, 2] and fetched.pop() == (3, 4, slice(2, 3))
    np.testing.assert_array_equal(np.asarray(rows), whole)
    assert fetched[2:] == [(0, 4, slice(None))]
    assert np.array(rows, np.float64).dtype == np.float64
    iterable: Any = rows  # by its length and its rows, as any sequence of old
    assert [r.tolist() for r in iterable] == whole.tolist()
    for index in (4, -5):
        with pytest.raises(IndexError, match="of 4"):
            rows[index]


def test_the_cache_is_never_overrun(tmp_path: Path) -> None:
    """A draft that would write behind the cache's last row is refused, to the row."""
    engine = build_engine(*make_pair(tmp_path), tmp_path / "engine", max_batch=1)
    most = engine.manifest.limits.cache_rows - engine.manifest.drafting.dims.block_size
    for rows in (most, most + 1):
        engine.truncate(0, 0)
        engine.prefill(0, np.zeros(rows, np.int64), rows="none", taps=True)
        request = DraftRequest(0, 1, 16, 1, lambda *_: DrawnFrom(0, np.empty(0, np.int32), np.empty(0)))
        if rows == most:
            assert np.isfinite(marginals(engine.draft([request])[0]).log_probs).all()
        else:
            with pytest.raises(EngineError, match="do not fit"):
                engine.draft([request])
