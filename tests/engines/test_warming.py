"""The passes that are made when an engine is opened, and what they leave behind."""

from __future__ import annotations

import pytest
from scripted import ScriptedEngine
from scripted_models import Good, MarkovTarget

from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.runtime.engines.passes import make_single_passes


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(MarkovTarget(), Good(MarkovTarget()))


def test_every_size_is_verified_then_a_chunk_then_drafts(engine: ScriptedEngine) -> None:
    """In one slot after the other, which are left empty."""
    drafted_from: list[tuple[int, int]] = []
    reports: list[tuple[str, int, int]] = []
    make_single_passes(
        engine,
        [1, 2, 8],
        lambda slot: drafted_from.append((slot, engine.draftable(slot, 99))),
        lambda *report: reports.append(report),
        slots=2,
    )
    chunk = engine.manifest.limits.prefill_chunk
    each = [("verify", 8), ("verify", 2), ("verify", 1), ("prefill", chunk)]
    found = [(*call.slots, call.verb, call.tokens) for call in engine.calls]
    assert found == [(slot, *made) for slot in (0, 1) for made in each]
    assert drafted_from == [(0, chunk), (1, chunk)]
    assert not any(engine.length(slot) or engine.draftable(slot, 99) for slot in (0, 1))
    assert reports == [("warm up", done, 10) for done in range(1, 11)]


def test_a_drafter_without_target_states_is_given_none(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, int]] = []
    monkeypatch.setattr(
        engine, "truncate", lambda slot, length: ends.append((engine.length(slot), engine.draftable(slot, 99)))
    )
    make_single_passes(engine, [1], None, no_progress)
    assert ends == [(engine.manifest.limits.prefill_chunk, 0)]


@pytest.mark.parametrize("at", ["verify", "prefill", "drafts"])
def test_a_pass_that_fails_leaves_the_slot_empty(engine: ScriptedEngine, at: str) -> None:
    def fail(verb: str = "drafts", slots: tuple[int, ...] = ()) -> None:
        if verb == at:
            raise RuntimeError("the device is lost")

    engine.fail = fail
    with pytest.raises(RuntimeError, match="the device is lost"):
        make_single_passes(engine, [4, 1], lambda slot: fail(), no_progress)
    assert engine.length(0) == engine.draftable(0, 99) == 0
