"""Measuring the tiny engine: everything runs on the same prompts, in turn, and gives the same text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_trt.bench.contender import Outcome, Request, TokenClock
from ddtree_trt.bench.prompts import BenchPrompt
from ddtree_trt.bench.replay import replay
from ddtree_trt.bench.result import merge
from ddtree_trt.bench.runner import Measurement, run_bench
from ddtree_trt.bench.session import Session
from ddtree_trt.bench.settings import BenchSettings, Case, Shard
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.runtime.params import SamplingParams


def settings(engine: Path, **changes: object) -> BenchSettings:
    values = {"engine": str(engine), "budgets": (4, "auto"), "limit": 2, "max_tokens": 16, "warmup_tokens": 4}
    return BenchSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_every_case_runs_on_every_prompt_and_gives_the_text_of_ar(tiny_engine: Path) -> None:
    result = run_bench(settings(tiny_engine, temperatures=(0.0, 1.0), repeats=2))
    assert [c.label for c in result.cases] == ["ar", "dflash", "ddtree@4", "ddtree@auto"]
    seen = Counter((s.case, s.prompt, s.temperature, s.repeat) for s in result.samples)
    assert len(seen) == 4 * 2 * 2 * 2
    assert set(seen.values()) == {1}
    digests: dict[Any, set[str | None]] = {(s.prompt, s.temperature, s.repeat): set() for s in result.samples}
    for s in result.samples:
        digests[s.prompt, s.temperature, s.repeat].add(s.output_digest)
        assert s.output_tokens == 1 + sum(s.acceptance_lengths or ())
        assert 0 < sum(s.stage_s.values()) - s.stage_s["prefill"] <= s.decode_s
    assert all(len(outputs) == 1 for outputs in digests.values())


def test_who_begins_rotates(tiny_engine: Path) -> None:
    result = run_bench(settings(tiny_engine, limit=4, max_tokens=2))
    firsts = [s.case for s in result.samples if s.order == 0]
    assert firsts == ["ar", "dflash", "ddtree@4", "ddtree@auto"]


def test_shards_together_are_the_whole(tiny_engine: Path) -> None:
    chosen = settings(tiny_engine, limit=3, max_tokens=8, temperatures=(1.0,), warmup_tokens=0)
    whole = run_bench(chosen)
    merged = merge([run_bench(chosen, Shard(i, 2)) for i in (1, 2)])

    def outputs(samples: Sequence[object]) -> set[tuple[object, ...]]:
        return {(s.case, s.prompt, s.output_digest) for s in samples}  # type: ignore[attr-defined]

    assert outputs(merged.samples) == outputs(whole.samples)


def test_every_request_starts_cold(tiny_engine: Path) -> None:
    session = Session(tiny_engine)
    for _ in range(2):
        output, _ = session.generate([5, 6, 7, 8], SamplingParams(max_tokens=4))
        assert output.metrics.cached_tokens == 0
    session.close()


def test_a_replay_measures_the_same_again(tiny_engine: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is 2 + 3?"}) + "\n")
    old = run_bench(settings(tiny_engine, prompts=(str(prompts),), max_tokens=8))
    new = replay(old, str(tiny_engine))
    assert [(s.case, s.output_digest) for s in new.samples] == [(s.case, s.output_digest) for s in old.samples]
    prompts.write_text(json.dumps({"prompt": "What is 3 + 3?"}) + "\n")
    with pytest.raises(UsageError, match="content has changed"):
        replay(old)


def test_prompts_that_cannot_fit_are_left_out_and_named(tiny_engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [5] * n}) + "\n" for n in (4, 5000)))
    result = run_bench(settings(tiny_engine, prompts=(str(path),), max_tokens=4))
    assert {s.prompt for s in result.samples} == {"mine/0"}
    assert result.parts[0].skipped == ("mine/1",)
    with pytest.raises(UsageError, match="lower --max-tokens"):
        run_bench(settings(tiny_engine, prompts=(str(path),), max_tokens=4000, warmup_tokens=0))


def test_what_cannot_run_is_refused_before_anything_is_measured(tiny_engine: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="method 'draft-model' needs"):
        run_bench(settings(tiny_engine, methods=("draft-model",)))
    with pytest.raises(UsageError, match="unknown peer 'vllm'"):
        run_bench(settings(tiny_engine, peers=("vllm",)))
    with pytest.raises(UsageError, match="takes ddtree-reference=PATH"):
        run_bench(settings(tiny_engine, peers=("ddtree-reference",)))
    with pytest.raises(ArtifactError, match="no engine at"):
        run_bench(settings(tmp_path / "absent"))


class Talker:
    """A contender whose answers are written down, with what it was asked."""

    def __init__(self, cases: tuple[Case, ...]) -> None:
        self.cases, self.asked = cases, []  # type: ignore[var-annotated]

    def describe(self) -> dict[str, str]:
        return {}

    def run(self, case: Case, prompt_ids: Sequence[int], request: Request) -> Outcome:
        self.asked.append((case.label, list(prompt_ids), request))
        return Outcome(2, 0.1, 0.1, token_ids=(7, 8), text=f"answer of {case.label}", acceptance_lengths=(1,))

    def close(self) -> None:
        pass


def test_later_turns_follow_the_answers_of_ar(tiny_engine: Path) -> None:
    session = Session(tiny_engine)
    talker = Talker((Case("ar"), Case("dflash")))
    run = Measurement(settings(tiny_engine), session, [talker], lambda stage, done, total: None)
    opening = [{"role": "user", "content": "First?"}]
    run.measure([BenchPrompt("chat/0", "chat", opening, ("Second?",))], Shard())
    second = [*opening, {"role": "assistant", "content": "answer of ar"}, {"role": "user", "content": "Second?"}]
    expected = [session.codec.encode(opening)] * 2 + [session.codec.encode(second)] * 2
    assert [ids for _, ids, _ in talker.asked] == expected
    assert [label for label, _, _ in talker.asked] == ["ar", "dflash", "dflash", "ar"]
    assert {s.prompt for s in run.samples} == {"chat/0#0", "chat/0#1"}
    session.close()


def test_requests_stop_as_the_engine_does_and_have_seeds_of_their_own(tiny_engine: Path) -> None:
    session = Session(tiny_engine)
    talker = Talker((Case("ar"),))
    chosen = settings(tiny_engine, repeats=2, seed=10)
    run = Measurement(chosen, session, [talker], lambda stage, done, total: None)
    run.measure([BenchPrompt(f"p/{i}", "p", [5, 6]) for i in range(2)], Shard())
    requests = [request for _, _, request in talker.asked]
    assert [r.seed for r in requests] == [10, 11, 12, 13]
    assert {r.stop_token_ids for r in requests} == {session.manifest.stop_token_ids}
    session.close()


def test_a_clock_counts_rounds_and_leaves_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 10.6, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = TokenClock()
    for tokens in (3, 0, 2, 4):
        clock.arrived(tokens)
    outcome = clock.outcome(range(9))
    assert (outcome.output_tokens, outcome.first_tokens) == (9, 3)
    assert outcome.acceptance_lengths == (2, 4)
    assert outcome.first_token_s == pytest.approx(0.5)
    assert outcome.decode_s == pytest.approx(0.5)
    assert np.isclose(outcome.decode_s / 6, 0.5 / 6)
