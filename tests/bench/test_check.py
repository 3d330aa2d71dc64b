"""The check passes what is right and fails what is wrong, for the reason it names."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import Cli
from engine_files import vouch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.bench.measure import Session
from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.check import run as check
from ddtree_trt.check.findings import (
    BINS,
    CAUSES,
    CERTAIN,
    FALSE_ALARM,
    FEWEST,
    Difference,
    chi_square_tail,
    describe,
    place_in_distribution,
    uniformity,
)
from ddtree_trt.check.run import check_engine, target_logits
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.params import SamplingParams


@pytest.fixture(autouse=True)
def fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "GREEDY_BUDGETS", ("auto", 16))
    monkeypatch.setattr(check, "SAMPLED_BUDGETS", (16,))


def settings(engine: Path, **changes: object) -> CheckSettings:
    values = {"engine": str(engine), "limit": 2, "max_tokens": 32, "seeds": 0, "sampled_prompts": 2}
    return CheckSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_a_good_engine_passes(tiny_engine: Path) -> None:
    report = check_engine(settings(tiny_engine, seeds=4, max_tokens=24))
    assert report.passed
    assert {f.case for f in report.greedy} >= {"ar", "dflash", "dflash-sample", "ddtree@auto", "ddtree@16"}
    assert all(not f.differences for f in report.greedy)
    assert {f.case for f in report.tau} == {"dflash", "ddtree@64"}
    assert {f.case for f in report.distribution} >= {"ar", "dflash", "ddtree@16"}
    lines = describe(report)
    assert lines[-1] == "passed" and not [line for line in lines if "FAIL" in line]
    assert report.to_dict()["passed"] is True
    few = replace(report, distribution=(uniformity([0.0] * (FEWEST - 1), "ar"),))
    assert few.passed and any("too few to judge; raise --seeds" in line for line in describe(few))


def test_a_walk_that_accepts_too_much_fails(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_node(parents: object, token_ids: object, choices: np.ndarray) -> np.ndarray:
        return np.unique([0, len(choices) - 1]).astype(np.int32)

    monkeypatch.setattr("ddtree_trt._native.walk", last_node)
    report = check_engine(settings(tiny_engine))
    verdicts = {f.case: f.passed for f in report.greedy}
    assert verdicts["ar"] and not verdicts["ddtree@16"] and not report.passed
    difference = next(f for f in report.greedy if f.case == "ddtree@16").differences[0]
    assert difference.gap is not None and difference.gap > difference.rounding
    assert any("an exact engine has none" in line for line in describe(report))
    assert report.to_dict()["greedy"][0]["passed"] is True


def test_a_sampler_that_prefers_likely_tokens_fails(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, choose_against = Sampler.choose, Sampler.choose_against
    monkeypatch.setattr(Sampler, "choose", lambda self, logits: choose(self, 3 * logits))
    monkeypatch.setattr(Sampler, "choose_against", lambda self, logits, drawn: choose_against(self, 3 * logits, drawn))
    monkeypatch.setattr(check, "TEMPERATURES", (3.0,))
    report = check_engine(settings(tiny_engine, seeds=8, max_tokens=2))
    assert not any(f.passed for f in report.distribution) and all(f.passed for f in report.greedy)
    assert not report.passed


@pytest.fixture
def hopeful_engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine, expected to be far better than it is."""
    directory = tmp_path / "engine"
    shutil.copytree(tiny_engine, directory)
    vouch(directory, golden_tau={"dflash": (50.0, 60.0), "ddtree": (0.5, 1.0)})
    return directory


def test_a_low_tau_fails_and_names_the_usual_causes(hopeful_engine: Path, tmp_path: Path) -> None:
    report = check_engine(settings(hopeful_engine))
    low, high = report.tau
    assert not low.passed and report.drafting is not None and report.drafting.low
    assert high.passed, "above the range is no fault: it was verified"
    *lines, verdict = describe(report)
    assert verdict == "FAILED" and all(any(cause in line for line in lines) for cause in CAUSES)
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "What is 2 + 3?"}\n')
    report = check_engine(settings(hopeful_engine, prompts=(str(path),)))
    assert report.passed and "not judged" in "\n".join(describe(report)), "of other prompts it is only shown"


def test_target_logits_are_those_each_token_was_chosen_from(tiny_engine: Path) -> None:
    with closing(Session(tiny_engine)) as session:
        prompt = [5 + i % 50 for i in range(session.manifest.limits.prefill_chunk + 7)]
        output, _ = session.generate(prompt, SamplingParams(max_tokens=9, method="ar", ignore_eos=True))
        rows = target_logits(session, prompt, output.outputs[0].token_ids)
        assert rows.shape == (9, session.manifest.target_dims.vocab_size)
        assert rows.argmax(1).tolist() == output.outputs[0].token_ids


def test_only_a_tie_within_rounding_explains_a_difference(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gap, explained in ((0.0, True), (1e-6, True), (1e-3, False), (None, False)):
        assert Difference("p", 3, 1, 2, gap, rounding=1e-5).explained is explained
    allowed = [PRECISIONS[name].relative_rounding for name in ("fp32", "fp16", "bf16")]
    assert allowed == sorted(set(allowed)) and allowed[-1] < 0.1, "coarser precisions allow more"
    with closing(Session(tiny_engine)) as session:
        for exact in (True, False):
            monkeypatch.setattr(session.engine, "inexact", None if exact else "it is asked to be")
            difference = check._explain(session, "p", [5, 6], [7, 8], [7, 9])
            assert (difference.rounding == 0) is exact
            assert replace(difference, gap=0.0).explained is not exact, "an exact engine's ties have one end"
            for expected, found in (([7, 8], [7]), ([7], [7, 8])):  # that an output ends early has no excuse
                difference = check._explain(session, "p", [5, 6], expected, found)
                assert (difference.position, difference.gap, difference.explained) == (1, None, False)


def test_what_cannot_be_checked_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(UsageError, match="lower --max-tokens"):
        check_engine(settings(tiny_engine, max_tokens=100_000))


def test_the_command_ends_with_the_verdict(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    quick = ("check", tiny_engine, "--limit", 1, "--max-tokens", 64, "--seeds", 0)
    code, out, _ = cli(*quick)
    assert code == 0 and out.endswith("passed\n")
    monkeypatch.setattr("ddtree_trt.check.findings.GreedyFinding.passed", False)
    code, out, _ = cli(*quick, "--json")
    assert code == 1 and json.loads(out)["passed"] is False


@given(st.floats(0, 200), st.integers(1, 20).map(lambda n: 2 * n))
def test_the_tail_of_chi_square_is_scipys(statistic: float, degrees: int) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9, abs=1e-300)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=5), st.floats(0.3, 4), st.integers(0, 1000))
def test_a_token_lies_where_its_mass_is(levels: list[int], temperature: float, seed: int) -> None:
    """Tokens come by falling probability, equal ones by number; where one is all but certain nothing is told."""
    rng, logits = np.random.default_rng(seed), np.array(levels, np.float32)
    mass, before = special.softmax(logits.astype(float) / temperature), 0.0
    for token in sorted(range(len(levels)), key=lambda token: (-levels[token], token)):
        place = place_in_distribution(logits, token, temperature, rng)
        if mass.max() >= CERTAIN:
            assert place is None
        else:
            assert place is not None and before - 1e-9 <= place <= before + mass[token] + 1e-9
        before += mass[token]


def test_the_false_alarm_rate_is_what_is_stated() -> None:
    """Over many honest samplers the p-value is uniform: about as many lie below any level as it says."""
    rng = np.random.default_rng(0)
    p_values = [uniformity(rng.random(50 * BINS).tolist()).p_value or 0.0 for _ in range(2000)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    assert sum(p < 0.01 for p in p_values) / 2000 == pytest.approx(0.01, abs=0.007)
    assert FALSE_ALARM <= 1e-4


def test_a_small_bias_is_found_with_enough_draws() -> None:
    """One token in twenty taken from the likeliest half instead of from everywhere."""
    rng = np.random.default_rng(1)
    places = np.where(rng.random(20_000) < 0.05, rng.random(20_000) / 2, rng.random(20_000))
    assert not uniformity(places.tolist()).passed
