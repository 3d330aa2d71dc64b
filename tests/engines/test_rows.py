"""Rows of logits: what a prefill returns on every backend, and rows that stay on a device."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_builds import PACKAGED, build_torch_engine
from fake_trt_engine import Lowerings
from scripted import ScriptedEngine
from scripted_models import Good, MarkovTarget

from ddtree_trt.runtime.engines.base import Engine, LogitRows
from ddtree_trt.runtime.engines.load import open_engine

BACKENDS = ("onnxruntime", "torch", "tensorrt", "scripted")


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
        "scripted": lambda: ScriptedEngine(MarkovTarget(64), Good(MarkovTarget(64))),
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
