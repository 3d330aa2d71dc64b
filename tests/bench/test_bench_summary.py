"""Statistics over samples whose answers can be worked out by hand, and the tables made of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from bench_results import STAGES, make_environment, make_result, make_sample

from ddtree_trt.bench.replay import differences, ratios
from ddtree_trt.bench.reporting import latex
from ddtree_trt.bench.reporting import markdown as report
from ddtree_trt.bench.reporting.summary import Row, best_fixed, summarize
from ddtree_trt.bench.result import BenchResult
from ddtree_trt.runtime.stats import AutomaticRounds


def rows_of(result: BenchResult, *, pooled: bool = False) -> dict[str, Row]:
    return {row.case.label: row for row in summarize(result, pooled=pooled)}


def test_speedup_is_a_ratio_of_mean_seconds_per_token() -> None:
    result = make_result(
        make_sample("ar", "set/0", token_ms=2),
        make_sample("ar", "set/1", token_ms=6),
        make_sample("ddtree@4", "set/0", token_ms=1),
        make_sample("ddtree@4", "set/1", token_ms=1),
    )
    row = rows_of(result)["ddtree@4"]
    assert row.speedup.value == pytest.approx(4.0)  # not the mean of 2 and 6's ratios, nor their median
    assert row.speedup.low == pytest.approx(2.0)
    assert row.speedup.high == pytest.approx(6.0)
    assert row.tokens_per_s.value == pytest.approx(1000)
    assert rows_of(result)["ar"].speedup.value == 1


def test_the_automatic_budget_is_compared_prompt_by_prompt() -> None:
    slow, fast = {"set/0": 4.0, "set/1": 9.0, "set/2": 1.0}, {"set/0": 2.0, "set/1": 3.0, "set/2": 2.0}
    result = make_result(
        *(make_sample("ar", prompt, token_ms=ms) for prompt, ms in slow.items()),
        *(make_sample("ddtree@4", prompt, token_ms=ms) for prompt, ms in slow.items()),
        *(make_sample("ddtree@auto", prompt, token_ms=ms) for prompt, ms in fast.items()),
    )
    ratio = rows_of(result)["ddtree@4"].auto_over
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)  # of 2, 3 and a half, not the ratio of the medians
    table = dict(report.auto_ratios(summarize(result))[1])
    assert table.keys() == {"ar", "ddtree@4"}
    assert "2.00× [1.25, 2.50]" in report.markdown(result)
    without = make_result(make_sample("ar"), make_sample("ddtree@4"))
    assert rows_of(without)["ddtree@4"].auto_over is None
    assert not report.auto_ratios(summarize(without))[1]


def test_a_sentence_says_what_automatic_budgets_expected() -> None:
    sums = AutomaticRounds(8, 4, 1, 12.0, 10, 0.008, 0.004)
    result = make_result(
        make_sample("ar"),
        make_sample("ddtree@4"),
        *(make_sample("ddtree@auto", f"set/{i}", automatic=dataclasses.asdict(sums)) for i in (0, 1)),
    )
    line = (
        "ddtree@auto drafted in 50% of 16 rounds (in 2 to see whether it pays again), expecting 3.00 tokens in 2.00 ms "
        "where one without a draft takes 1.00 ms: 1.50×. It got 2.50 tokens."
    )
    assert report.why_auto(summarize(result)) == [line] and line in report.markdown(result)
    never = make_result(
        make_sample("ar"), make_sample("ddtree@auto", automatic=dataclasses.asdict(AutomaticRounds(rounds=5)))
    )
    assert report.why_auto(summarize(never)) == ["ddtree@auto drafted in 0% of 5 rounds."]
    assert not report.why_auto(summarize(make_result(make_sample("ar"), make_sample("ddtree@auto"))))  # older results


def test_repeats_of_a_prompt_count_as_their_median() -> None:
    times = (1.0, 1.2, 50.0)  # one slow moment
    result = make_result(
        make_sample("ar", token_ms=2),
        *(make_sample("dflash", token_ms=ms, repeat=i) for i, ms in enumerate(times)),
    )
    assert rows_of(result)["dflash"].tokens_per_s.value == pytest.approx(1000 / 1.2)


def test_tau_is_a_mean_over_prompts_and_not_over_rounds() -> None:
    result = make_result(
        make_sample("ar"),
        make_sample("ddtree@4", "set/0", acceptance_lengths=(2,) * 10),
        make_sample("ddtree@4", "set/1", acceptance_lengths=(8, 8)),
    )
    row = rows_of(result)["ddtree@4"]
    assert row.tau is not None
    assert row.tau.value == pytest.approx(5.0)


def test_acceptance_by_depth_counts_rounds() -> None:
    result = make_result(make_sample("ar"), make_sample("ddtree@4", acceptance_lengths=(1, 2, 4, 4)))
    assert rows_of(result)["ddtree@4"].acceptance_by_depth == (0.75, 0.5, 0.5)


def test_what_stages_leave_of_a_round_is_other() -> None:
    result = make_result(make_sample("ar"), make_sample("ddtree@4", token_ms=0.3, stage_s=STAGES))
    stages = rows_of(result)["ddtree@4"].stage_ms
    assert stages["verify"] == pytest.approx(0.8)
    assert stages["other"] == pytest.approx(6.0 / 5 - 5.3 / 5)


def test_only_equal_tokens_are_the_same_output() -> None:
    result = make_result(
        make_sample("ar", "set/0"),
        make_sample("ar", "set/1"),
        make_sample("dflash", "set/0"),
        make_sample("dflash", "set/1", output_digest="other"),
        make_sample("openai:box", "set/0", output_digest=None),
    )
    rows = rows_of(result)
    assert (rows["dflash"].identical, rows["dflash"].comparable) == (1, 2)
    assert rows["openai:box"].comparable == 0


def test_a_peer_that_samples_is_not_compared() -> None:
    result = make_result(make_sample("ar", temperature=1.0), make_sample("hf:generate", temperature=1.0))
    rows = rows_of(result)
    assert rows["hf:generate"].comparable == 0
    assert rows["ar"].comparable == 1


def test_a_request_of_one_token_has_no_speed() -> None:
    result = make_result(
        make_sample("ar", "set/0"),
        make_sample("ar", "set/1", decoded_tokens=0, decode_s=0.0, acceptance_lengths=()),
        make_sample("dflash", "set/1", decoded_tokens=0, decode_s=0.0, acceptance_lengths=()),
    )
    rows = rows_of(result)
    assert rows["ar"].prompts == 1
    assert math.isnan(rows["dflash"].speedup.value)
    assert rows["dflash"].tau is None
    assert "–" in report.markdown(result)


def test_rows_come_by_set_and_temperature_and_in_the_order_of_the_settings() -> None:
    samples = [
        make_sample(case, f"{source}/0", temperature=t)
        for case in ("hf:generate", "ddtree@auto", "ddtree@4", "dflash", "ar")
        for t in (1.0, 0.0)
        for source in ("b", "a")
    ]
    rows = summarize(make_result(*samples))
    assert [(r.source, r.temperature) for r in rows][::5] == [("b", 0.0), ("b", 1.0), ("a", 0.0), ("a", 1.0)]
    assert [r.case.label for r in rows[:5]] == ["ar", "dflash", "ddtree@4", "ddtree@auto", "hf:generate"]
    pooled = summarize(make_result(*samples), pooled=True)
    assert {(r.source, r.prompts) for r in pooled} == {("all", 2)}


def test_the_best_fixed_budget_is_the_fastest() -> None:
    result = make_result(
        make_sample("ar", token_ms=4),
        make_sample("ddtree@4", token_ms=2),
        make_sample("ddtree@16", token_ms=1),
        make_sample("ddtree@auto", token_ms=0.5),
    )
    best = best_fixed(summarize(result))
    assert best is not None
    assert best.case.budget == 16


COMPARED = make_result(
    make_sample("ar", token_ms=4),
    make_sample("dflash", token_ms=2, stage_s=STAGES),
    make_sample("ddtree@4", token_ms=1, stage_s=STAGES, mean_budget=4.0),
    make_sample("ddtree@16", token_ms=2, mean_budget=16.0),
    make_sample("ddtree-reference:ddtree@4", token_ms=4),
    peers=("ddtree-reference=somewhere",),
)


def test_round_times_stand_beside_the_peers_at_the_same_budget() -> None:
    _, body = report.round_times(summarize(COMPARED))
    assert body == [["ddtree@4", "4.00", "16.00", "0.25×", "4.00", "4.00"]]


def test_markdown_has_every_case_and_what_must_be_known() -> None:
    text = report.markdown(COMPARED)
    assert "| ddtree@4 | 1000 [1000, 1000] | 4.00× [4.00, 4.00] | 4.00 | 4.00 [4.00, 4.00] | 4.0 | 2.0 | 1/1 |" in text
    assert text.count("| ddtree@4 |") == 3  # overview, stages, round times
    assert "abacus" in text
    assert "Forced" not in text
    assert "busy" not in text


def test_what_makes_figures_special_is_said() -> None:
    result = make_result(make_sample("ar"), forced_acceptance=4, random_weights=True)
    busy = dataclasses.replace(result.parts[0], environment=make_environment(load_1min=7.5), skipped=("set/9",))
    text = report.markdown(dataclasses.replace(result, parts=(busy,)))
    for words in (
        "Forced acceptance: every round commits up to 4",
        "Random weights",
        "load 7.50 on 2 cores",
        "left out",
    ):
        assert words in text


def test_latex_is_the_papers_table() -> None:
    text = latex.latex([COMPARED, COMPARED])
    assert r"\multicolumn{4}{c}{pair} & \multicolumn{4}{c}{pair} \\" in text
    assert r"\cmidrule(lr){2-5}\cmidrule(lr){6-9}" in text
    assert r"\emph{Temperature 0}" in text
    line = r"2.00$\times$ & \textbf{4.00} & \textbf{4.00$\times$} & \textbf{4.00}"
    assert rf"set & {line} & {line} \\" in text
    assert text.count(r"\begin{tabular}{lrrrrrrrr}") == 1
    assert text.rstrip().endswith(r"\end{tabular}")


def test_latex_puts_the_papers_sets_first_and_escapes_names() -> None:
    samples = [
        make_sample(case, f"{source}/0") for case in ("ar", "dflash") for source in ("my_set", "alpaca", "gsm8k")
    ]
    text = latex.latex([make_result(*samples)])
    assert text.index("GSM8K") < text.index("Alpaca") < text.index(r"my\_set")


def test_a_replay_shows_new_over_old_and_what_changed() -> None:
    faster = make_result(make_sample("ar", token_ms=2), make_sample("ddtree@4", token_ms=1, stage_s=STAGES))
    header, body = ratios(COMPARED, faster)
    assert header[3:] == ["tokens/s", "speedup", "τ", "ms/round"]
    assert body == [
        ["set", "0", "ar", "2.00×", "1.00×", "1.00×", "0.50×"],
        ["set", "0", "ddtree@4", "1.00×", "0.50×", "1.00×", "1.00×"],
    ]
    assert differences(COMPARED, faster) == []
    part = dataclasses.replace(faster.parts[0], environment=make_environment(packages={"numpy": "3"}))
    assert differences(COMPARED, dataclasses.replace(faster, parts=(part,))) == ["numpy: was 2, is 3"]
