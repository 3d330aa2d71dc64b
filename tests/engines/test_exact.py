"""Engines whose rows do not depend on how many others are in a pass: single tokens beside chains, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_builds import CHATS, PACKAGED, build_torch_engine

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.profile import fingerprint
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.tree import token_chain
from workbench.equal_bits import compare

STEPS = 140
CHAINS = ((2,), (5,), (9,), (17,), (33,), (129,), (1, 4, 2, 9, 17, 1, 1, 3))


@pytest.fixture(scope="module", params=["fp32", "int8"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / request.param
    compile_engine(BuildRequest(target="tiny", output=path, precision=request.param, max_seq_len=320, max_batch=2))
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[OrtEngine]:
    engine = OrtEngine(directory, load_manifest(directory), EngineOptions(threads=1, exact=True))
    yield engine
    engine.close()


def tokens_of(engine: OrtEngine, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, engine.manifest.target_dims.vocab_size, count)


def start(engine: OrtEngine) -> None:
    engine.truncate(0, 0)
    engine.prefill(0, tokens_of(engine, 40, 0), rows="last", taps=False)


def step(engine: OrtEngine, tokens: np.ndarray, kept: int) -> np.ndarray:
    """Verify a chain and commit its first `kept` tokens; the logits [T, V]."""
    (verdict,) = engine.verify([VerifyRequest(0, token_chain(tokens))])
    logits = np.array(verdict.logits)
    assert verdict.choices.tolist() == logits.argmax(-1).tolist()
    engine.commit(0, np.arange(kept, dtype=np.int32), taps=False)
    return logits


def differences(engine: OrtEngine) -> list[float]:
    """How far the logits of chains of several lengths, accepted in part, lie from those of single tokens."""
    tokens = tokens_of(engine, STEPS, 1)
    start(engine)
    alone = np.concatenate([step(engine, tokens[i : i + 1], 1) for i in range(STEPS)])
    found = []
    for lengths in CHAINS:
        start(engine)
        place, largest, turn = 0, 0.0, 0
        while place < STEPS:
            chain = tokens[place : place + lengths[turn % len(lengths)]]
            kept = max(1, len(chain) - turn % 3)
            logits = step(engine, chain, kept)
            largest = max(largest, float(np.abs(logits - alone[place : place + len(chain)]).max()))
            place, turn = place + kept, turn + 1
        found.append(largest)
    for chunk in (1, 2, 7, 65, STEPS):  # as after a reused prefix, or at a prompt's end
        start(engine)
        rows = [
            np.array(engine.prefill(0, tokens[i : i + chunk], rows="all", taps=False).logits)
            for i in range(0, STEPS, chunk)
        ]
        found.append(float(np.abs(np.concatenate(rows) - alone).max()))
    return found


def test_a_tokens_logits_are_the_same_bits_alone_and_in_a_chain(engine: OrtEngine) -> None:
    assert differences(engine) == [0.0] * (len(CHAINS) + 5)


def test_they_are_not_without(directory: Path) -> None:
    """Else the test above would say nothing, and the idle row be for nothing."""
    engine = OrtEngine(directory, load_manifest(directory), EngineOptions(threads=1, exact=False))
    assert max(differences(engine)) > 0
    engine.close()


def test_the_idle_row_leaves_no_trace(engine: OrtEngine) -> None:
    """Lengths, states for the drafter and the other slot are what they are without it."""
    start(engine)
    tokens = tokens_of(engine, 3, 2)
    engine.prefill(1, tokens, rows="last", taps=True)
    before = engine._target.cache.buffer[:, 1].copy()
    step(engine, tokens[:1], 1)
    assert engine.length(0) == 41 and engine.length(1) == 3
    np.testing.assert_array_equal(engine._target.cache.buffer[:, 1], before)
    verdict = engine.prefill(1, tokens[:1], rows="last", taps=True)
    assert np.shape(verdict.logits) == (1, engine.manifest.target_dims.vocab_size) and verdict.choices.shape == (1,)
    assert engine.draftable_length(1) == 4
    passed = engine._last_passes[1]
    token_ids, taps = passed.token_ids, passed.taps
    assert len(token_ids) == 1 and taps is not None and len(taps) == 1


def test_an_int8_engine_needs_no_idle_row(engine: OrtEngine) -> None:
    start(engine)
    step(engine, tokens_of(engine, 1, 4), 1)
    shapes = {name: array.shape for name, array in engine._target.buffers._views.items()}
    rows = 1 if engine.manifest.precision == "int8" else 2
    assert shapes["token_ids"] == (1, rows) and shapes["taps"][1] == rows
    assert shapes["rows"] == (rows,) and shapes["logits"][0] == rows


def test_the_last_row_of_a_cache_has_no_room_for_an_idle_one(engine: OrtEngine) -> None:
    rows, chunk = engine.manifest.limits.cache_rows, engine.manifest.limits.prefill_chunk
    tokens = tokens_of(engine, rows, 3)
    engine.truncate(0, 0)
    for i in range(0, rows - 2, chunk):
        engine.prefill(0, tokens[i : min(i + chunk, rows - 2)], rows="last", taps=False)
    for length in (rows - 1, rows):
        logits = step(engine, tokens[length - 1 : length], 1)
        assert np.isfinite(logits).all() and logits.shape[0] == 1
        assert engine.length(0) == length
    with pytest.raises(EngineError, match="1 more do not fit"):
        step(engine, tokens[:1], 1)


def sums_of_differences(directory: Path, exact: bool) -> tuple[int, int]:
    """Differing tokens and differing rows of logits among random methods, budgets and batches."""
    with LLM(directory, threads=1, exact=exact) as llm:
        *_, sums = compare(llm, CHATS[::9], 1500, length=60)
    assert sums.tokens >= 1500 and sums.tokens > 2 * sums.rounds
    return sums.other_tokens, sums.other_rows


def test_trees_give_the_bits_of_ar(directory: Path) -> None:
    assert sums_of_differences(directory, exact=True) == (0, 0)


def test_trees_give_other_bits_without(directory: Path) -> None:
    """Else the test above would say nothing."""
    assert sums_of_differences(directory, exact=False)[1] > 0


def test_int8_is_exact_unless_it_is_told_otherwise(directory: Path) -> None:
    """And costs measured in one way are not taken for the other's."""
    precision, marks = load_manifest(directory).precision, set()
    for exact in (None, True, False):
        engine = open_engine(directory, threads=1, exact=exact)
        assert isinstance(engine, OrtEngine)
        assert engine.exact is (precision == "int8" if exact is None else exact)
        marks.add((engine.exact, fingerprint(engine.manifest, 1)))
        engine.close()
    assert len(marks) == 2 == len({mark for _, mark in marks})


def test_other_backends_refuse_the_choice(tmp_path: Path) -> None:
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e").close()
    for exact in (True, False):
        with pytest.raises(UsageError, match=r"exact is for engines of the onnxruntime backend, .* for torch"):
            LLM(tmp_path / "e", exact=exact)
