"""`profile.json`: what is stored for all users, what is refused, and that no trouble with it ends anything."""

import dataclasses
import gc
import json
import logging
import os
import random
import resource
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import WRONG, mutate_json, places, with_value
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine
from scripted_models import MarkovTarget, Useless

from ddtree_trt.artifact.files import PROFILE
from ddtree_trt.errors import ArtifactError
from ddtree_trt.runtime.decoding.budget.costs import KNOWN, Costs
from ddtree_trt.runtime.engines import profile as profiles
from ddtree_trt.runtime.engines.profile import Correction, PassTimes, Profile, fingerprint, measure, read_profile, store
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

MEASURE, LEARN = measure, Costs.learn  # before the fixture of all tests has nothing measured, and rounds teach nothing


def a_profile() -> Profile:
    near, far = (PassTimes(1, context, 0.001, ((1, 0.001), (2, 0.002), (5, 0.003))) for context in (64, 512))
    corrections = Correction("draft", 1, 0, 1.5, 9), Correction("verify", 3, 4, 0.5, 100)
    return Profile("f", near, far, PassTimes(8, 64, 0.004, ((1, 0.004),)), corrections)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store(tmp_path, a_profile())
    assert read_profile(tmp_path / PROFILE) == a_profile()
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE]


WHOLE: Any = json.loads(json.dumps(dataclasses.asdict(a_profile())))


def test_a_wrong_value_is_refused(tmp_path: Path) -> None:
    more: list[tuple[Any, Any]] = [(("near", "draft_s"), 3601.0), (("corrections", 0, "ratio"), 0), (("version",), 4)]
    more += [(("extra",), 1), (("many", "slots"), 0), (("far", "verify", 1, 1), 0), (("many", "verify", 0, 0), 0)]
    kinds = [(place, wrong) for place, value in places(WHOLE) for wrong in WRONG[type(value)]]
    for place, wrong in [*kinds, *more]:
        (tmp_path / PROFILE).write_text(json.dumps(with_value(WHOLE, place, wrong)))
        with pytest.raises(ArtifactError, match=r"; latencies are measured again$"):
            read_profile(tmp_path / PROFILE)


@given(st.integers(0, 1 << 32))
def test_damage_of_any_kind_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Or harmless: what is read can be written."""
    file = tmp_path_factory.getbasetemp() / PROFILE
    file.write_bytes(mutate_json(json.dumps(WHOLE), random.Random(seed)))
    try:
        store(file.parent, read_profile(file))
    except ArtifactError as refused:
        message = str(refused)
        assert message.endswith("; latencies are measured again")
        assert "\n" not in message and len(message) < 400 + len(str(file))


def test_foreign_profiles_are_measured(engine: tuple[Path, list[object]], caplog: pytest.LogCaptureFixture) -> None:
    directory, measured = engine
    assert open_and_close(directory, caplog) == [] and len(measured) == 1
    assert open_and_close(directory, caplog) == [] and len(measured) == 1, "the stored one fits"
    LLM(directory, threads=2).close()
    assert len(measured) == 2, "another thread count is another machine"


def test_what_rounds_show_is_saved_with_the_engine(
    engine: tuple[Path, list[object]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = engine
    monkeypatch.setattr(Costs, "learn", LEARN)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(directory) as llm:
        llm.generate("One and one", params)
        known = llm.core.maker._budgets.costs.corrected
    assert known.corrections and read_profile(directory / PROFILE) == known
    before = {(c.kind, c.slots, c.size): c.rounds for c in known.corrections}
    llm = LLM(directory)
    opened = llm.core.maker._budgets.costs.corrected
    assert [c.ratio for c in opened.corrections] == [c.ratio for c in known.corrections]
    llm.generate("One and one", params)
    del llm  # closed by nobody
    gc.collect()
    after = {(c.kind, c.slots, c.size): c.rounds for c in read_profile(directory / PROFILE).corrections}
    assert sum(after.values()) > sum(min(rounds, KNOWN) for rounds in before.values())
    assert open_and_close(directory, caplog) == []


def test_a_measured_profile_is_plausible_and_leaves_the_engine_empty(tiny_engine: Path) -> None:
    with LLM(tiny_engine) as llm:
        profile = MEASURE(llm.engine)
        assert llm.engine.length(0) == 0
        assert profile.fingerprint == fingerprint(llm.engine.manifest, llm.engine.threads)
    assert profile.far is not None and profile.many is not None
    assert profile.many.slots == llm.engine.manifest.limits.max_batch
    for times in (profile.near, profile.far, profile.many):
        sizes = [tokens for tokens, _ in times.verify]
        assert sizes[0] == 1 and len(sizes) >= 2 and sizes == sorted(set(sizes))
        assert times.draft_s > 0 and all(seconds > 0 for _, seconds in times.verify)


def test_an_engine_that_pads_is_measured_at_the_sizes_it_pads_to() -> None:
    engine = ScriptedEngine(MarkovTarget(), Useless(6))
    engine.buckets = [1, 2, 4, 8, 16, 32, 48, 65]
    assert {tokens for tokens, _ in MEASURE(engine).near.verify} <= set(engine.buckets)


@pytest.mark.parametrize("kind", ["dflash", "autoregressive"])
def test_passes_are_timed_and_interpolated(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In simulated time, with several slots in one pass."""
    engine = ScriptedEngine(MarkovTarget(), Useless(6), kind=kind, max_batch=4)
    clock, waiting = [0.0], [0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def spend(verb: str, slots: tuple[int, ...]) -> None:
        call = engine.calls[-1]
        passes = call.tokens if kind == "autoregressive" else 1
        if verb in ("prefill", "draft"):
            clock[0] += 0.01 * waiting[0] if verb == "draft" else 0.0
            waiting[0] = waiting[0] + call.tokens if verb == "prefill" else 0
        clock[0] += {"draft": 0.5 * passes, "verify": 1.0 + 0.1 * (len(slots) * call.tokens - 1)}.get(verb, 0.0)

    engine.fail = spend
    monkeypatch.setattr(engine, "unseen", lambda slot: waiting[0])
    profile = MEASURE(engine)
    assert profile.near.draft_s == pytest.approx(0.5)
    assert profile.near.context_s == pytest.approx(0.01)
    assert profile.many is not None and profile.many.slots == 4
    tokens = np.array([1, 2, 3, 9])
    for slots in (1, 2, 4):
        found = profile.at(64, slots, lambda times: times.verify_s(tokens))
        assert found == pytest.approx(1.0 + 0.1 * (slots * tokens - 1))
    assert profile.at(5000, 1, lambda times: times.verify_s(tokens)) == pytest.approx(1.0 + 0.1 * (tokens - 1))


def test_a_longer_context_adds_for_every_slot_what_it_adds_for_one() -> None:
    profile = Profile("f", PassTimes(1, 64, 0.1, ((1, 1.0), (9, 2.0))), PassTimes(1, 164, 0.1, ((1, 1.5), (9, 3.0))))
    one = profile.at(264, 1, lambda times: times.verify_s(np.array([1, 5, 9])))
    assert one == pytest.approx([2.0, 3.0, 4.0])
    assert profile.at(264, 3, lambda times: times.verify_s(np.array([1, 5, 9]))) == pytest.approx(3 * one)


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[object]]]:
    """A copy of the engine, and how often it was measured; measuring takes no time."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for file in tiny_engine.iterdir():
        (directory / file.name).symlink_to(file)
    stored = read_profile(tiny_engine / PROFILE)
    measured: list[object] = []

    def measure(engine: Any, *_: object) -> Profile:
        measured.append(engine)
        return replace(stored, fingerprint=fingerprint(engine.manifest, engine.threads))

    monkeypatch.setattr(profiles, "measure", measure)
    (directory / PROFILE).unlink()
    yield directory, measured
    directory.chmod(0o755)


def open_and_close(directory: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that loading the engine logs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLM(directory).close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.write_bytes(bytes(2 << 20)), "it has more than 1 MiB"),
        (lambda path: path.write_text(json.dumps({**WHOLE, "near": 1})), "near must be an object, found 1"),
    ],
)
def test_a_damaged_one_is_measured_again_and_replaced(
    engine: tuple[Path, list[object]], caplog: pytest.LogCaptureFixture, make: Callable[[Path], object], reason: str
) -> None:
    directory, measured = engine
    make(directory / PROFILE)
    (line,) = open_and_close(directory, caplog)
    assert line == f"{directory / PROFILE}: {reason}; latencies are measured again"
    assert len(measured) == 1
    assert open_and_close(directory, caplog) == []
    assert len(measured) == 1, "the fresh one is in its place"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_its_mode_is_that_of_other_files(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        store(tmp_path, a_profile())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / PROFILE).stat().st_mode) == mode


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        store(tmp_path, a_profile())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = "cannot be written (File too large): latencies are measured at every start"
    assert caplog.messages == [f"{tmp_path / PROFILE} {reason}"] and not [*tmp_path.iterdir()]
