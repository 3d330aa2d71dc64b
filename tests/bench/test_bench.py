"""`ddtree-trt bench`: every case on every prompt, in turn, the same text from all; its figures by plain statements."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from engine_builds import PACKAGED, build_torch_engine

from ddtree_trt.bench import report
from ddtree_trt.bench.measure import (
    BenchPrompt,
    BenchResult,
    Outcome,
    Request,
    Run,
    Sample,
    Session,
    engine_runs,
    measure,
)
from ddtree_trt.bench.settings import BenchSettings, Case
from ddtree_trt.errors import UsageError

SETTINGS = BenchSettings("engine", budgets=("auto", 4), limit=2, max_tokens=12)


@pytest.mark.parametrize(
    ("changes", "kind", "labels"),
    [
        ({}, "dflash", "ar dflash ddtree@auto ddtree@4"),
        ({"device_rounds": "on"}, "dflash", "ar+device dflash+device ddtree@auto+device ddtree@4+device"),
        ({"methods": ("ar", "dflash-sample")}, "dflash", "ar dflash dflash-sample"),
        ({}, "autoregressive", "ar draft-model"),
        ({}, "eagle3", "ar eagle@auto eagle@4"),
    ],
)
def test_cases_are_the_baselines_and_every_budget(changes: dict[str, Any], kind: str, labels: str) -> None:
    assert [case.label for case in replace(SETTINGS, **changes).cases(kind)] == labels.split()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_case_runs_on_every_prompt_and_gives_the_text_of_ar(tiny_engine: Path, temperature: float) -> None:
    settings = replace(SETTINGS, repeats=2, temperature=temperature)
    with closing(Session(tiny_engine)) as session:
        result = measure(session, settings, engine_runs(session, settings))
        outputs = [session.run([5] * 40, Case("ar"), max_tokens=2)[0] for _ in range(2)]
        assert [output.metrics.cached_tokens for output in outputs] == [0, 0], "each starts cold"
    cases = ["ar", "dflash", "ddtree@auto", "ddtree@4"]
    seen = Counter((s.case, s.prompt, s.repeat) for s in result.samples)
    assert seen == {(case, f"tiny/{i}", n): 1 for case in cases for i in (0, 1) for n in (0, 1)}
    assert [s.case for s in result.samples if s.order == 0] == cases, "who begins rotates"
    for key in {(s.prompt, s.repeat) for s in result.samples}:
        assert len({s.outcome.token_ids for s in result.samples if (s.prompt, s.repeat) == key}) == 1
    for s in result.samples:
        o = s.outcome
        assert o.output_tokens == len(o.token_ids or ()) == 1 + sum(o.acceptance_lengths or ())
        assert 0 < sum(o.stage_s.values()) - o.stage_s["prefill"] <= o.decode_s
    rows = report.summarize(result.samples)
    assert [(row.case, row.identical, row.comparable) for row in rows] == [(case, 4, 4) for case in cases]


@pytest.mark.parametrize("device", [True, False])
def test_rounds_on_the_device_have_cases_of_their_own(tmp_path: Path, device: bool) -> None:
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", max_seq_len=256).close()
    settings = replace(SETTINGS, engine=str(tmp_path / "e"), device_rounds="on" if device else "off", limit=1)
    with closing(Session(tmp_path / "e", settings)) as session:
        result = measure(session, settings, engine_runs(session, settings))
    stages = {s.case: bool(s.outcome.stage_s) for s in result.samples}
    assert stages["ddtree@4+device" if device else "ddtree@4"] is not device


def test_prompts_that_cannot_fit_are_left_out_and_named(tiny_engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [5] * n}) + "\n" for n in (5000, 4)))
    settings = replace(SETTINGS, prompts=(str(path),))
    with closing(Session(tiny_engine)) as session:
        result = measure(session, settings, engine_runs(session, settings))
        assert ({s.prompt for s in result.samples}, result.skipped) == ({"mine/1"}, ("mine/0",))
        assert "1 prompts were too long" in report.text(result)
        with pytest.raises(UsageError, match="lower --max-tokens"):
            measure(session, replace(settings, max_tokens=4000), {})
        with pytest.raises(UsageError, match="method 'draft-model' needs"):
            engine_runs(session, replace(settings, methods=("draft-model",)))


def test_later_turns_follow_ar_and_seeds_rise(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[int], Request]] = []

    def talker(case: str) -> Run:
        def run(ids: Any, request: Request) -> Outcome:
            asked.append((case, list(ids), request))
            return Outcome(2, 0.1, 0.1, token_ids=(7, 8), text=f"answer of {case}", acceptance_lengths=(1,))

        return run

    opening = [{"role": "user", "content": "First?"}]
    second = [*opening, {"role": "assistant", "content": "answer of ar"}, {"role": "user", "content": "Second?"}]
    with closing(Session(tiny_engine)) as session:
        settings, runs = replace(SETTINGS, seed=10), {case: talker(case) for case in ("ar", "dflash")}
        prompts = [BenchPrompt("chat/0", "chat", opening, ("Second?",)), BenchPrompt("p/0", "p", [5, 6])]
        monkeypatch.setattr("ddtree_trt.bench.measure.load_prompts", lambda *_: prompts)
        result = measure(session, settings, runs)
        expected = [session.codec.encode(opening)] * 2 + [session.codec.encode(second)] * 2 + [[5, 6]] * 2
        stops = session.manifest.stop_token_ids
    measured = asked[2:]  # after the warm-up
    assert [ids for _, ids, _ in measured] == expected
    assert [case for case, _, _ in measured] == ["ar", "dflash", "dflash", "ar", "ar", "dflash"]
    assert [request.seed for _, _, request in measured] == [10] * 4 + [11] * 2
    assert {request.stop_token_ids for _, _, request in asked} == {stops}
    assert list(dict.fromkeys(s.prompt for s in result.samples)) == ["chat/0#0", "chat/0#1", "p/0"]


def sample(case: str, prompt: str, token_ms: float, lengths: tuple[int, ...], **changes: Any) -> Sample:
    """A request of 21 tokens, 20 of them decoded at `token_ms` each."""
    stages = {"draft": 1e-3, "tree_build": 1e-4, "tree_compile": 1e-4, "verify": 4e-3, "commit": 1e-4}
    outcome = Outcome(21, 0.002, token_ms / 50, 1, tuple(range(21)), "", lengths, 3.0, None, stages)
    return Sample(case, prompt.partition("/")[0], prompt, 0, 0, 8, replace(outcome, **changes))


def made_up(*samples: Sample) -> BenchResult:
    engine = {"name": "pair", "backend": "onnxruntime", "precision": "fp32", "threads": 1}
    environment = {"machine": "abacus", "cores": 2, "version": "0", "load_1min": 9.0, "started": "today"}
    return BenchResult(SETTINGS, engine, environment, (), samples)


RESULT = made_up(
    *(sample("ddtree@4", f"set/{i}", ms, (4,) * 5) for i, ms in enumerate((1.0, 2.0, 3.0))),
    *(sample("ar", f"set/{i}", ms, (1,) * 20) for i, ms in enumerate((3.0, 4.0, 5.0))),
    sample("ar", "other/0", 3.0, (1,) * 20),
    sample("ddtree@4", "other/0", 1.5, (1, 9, 10), token_ids=(9,), stage_s={}),
    sample(
        "hf:generate", "other/0", 6.0, (1,) * 20, token_ids=None, acceptance_lengths=None, mean_budget=None, stage_s={}
    ),
)


def test_figures_are_what_they_are_said_to_be() -> None:
    rows = {(row.source, row.case): row for row in report.summarize(RESULT.samples)}
    assert list(rows) == [
        ("set", "ar"),
        ("set", "ddtree@4"),
        ("other", "ar"),
        ("other", "ddtree@4"),
        ("other", "hf:generate"),
    ]
    tree = rows["set", "ddtree@4"]
    assert tree.tokens_per_s.value == pytest.approx(500) and tree.tau == 4 and tree.prompts == 3
    assert [tree.speedup.value, tree.round_ms] == pytest.approx([2.0, 8.0])  # mean over mean: 12 / 6
    assert 1.6 < tree.speedup.low < 2.0 < tree.speedup.high < 3.1
    assert tree.stage_ms["verify"] == pytest.approx(0.8)
    assert tree.stage_ms["other"] == pytest.approx(8 - 1.06) and set(tree.stage_ms) == set(report.STAGES)
    assert (tree.identical, tree.comparable) == (3, 3)
    other, peer = rows["other", "ddtree@4"], rows["other", "hf:generate"]
    assert (other.identical, other.comparable, other.stage_ms) == (0, 1, {}) and other.tau == pytest.approx(20 / 3)
    assert (peer.comparable, peer.tau, peer.round_ms) == (0, None, None) and peer.speedup.value == pytest.approx(0.5)
    repeats = [replace(sample("ar", "set/0", ms, (1,) * 20), repeat=i) for i, ms in enumerate((1.0, 9.0, 2.0))]
    (row,) = report.summarize(repeats)
    assert row.prompts == 1 and row.tokens_per_s.value == pytest.approx(500), "their median counts"
    text = report.text(RESULT)
    assert "**set** (3 prompts)" in text and "**other** (1 prompts)" in text
    assert "500 [417, 750]" in text and "| hf:generate |" in text
    assert "Do not trust times" in text
    assert "Do not trust" not in report.text(replace(RESULT, environment={**RESULT.environment, "load_1min": 0.1}))


def test_pictures_need_matplotlib(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = cli("bench", tmp_path, "--plot", tmp_path / "d.png")
    assert (code, out) == (1, "") and "pictures need matplotlib" in err and "bench]" in err


def test_a_run_is_shown_and_kept(tiny_engine: Path, tmp_path: Path, cli: Cli) -> None:
    quick = ("--limit", 2, "--max-tokens", 8, "--budgets", "4,auto")
    code, out, err = cli("bench", tiny_engine, *quick, "--json", tmp_path / "new/r.json", "--plot", tmp_path / "p.png")
    assert (code, err) == (0, ""), err
    assert all(word in out for word in ("| dflash ", "| ddtree@auto ", "tokens/s", "τ", "Milliseconds per round by"))
    kept = json.loads((tmp_path / "new/r.json").read_text())
    assert kept["settings"]["budgets"] == [4, "auto"] and len(kept["samples"]) == 8 and kept["schema_version"] == 2
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--budgets", "4,many"), 2, "--budgets must be numbers and auto"),
        (("--methods", "magic"), 2, "method must be one of"),
        (("--prompts", "absent.jsonl"), 2, "no prompts called 'absent.jsonl'"),
        (("--json", "FILE/r.json"), 2, "cannot write into"),
        (("ABSENT",), 1, "build one there with"),
    ],
)
def test_a_wrong_call_is_one_line(
    tiny_engine: Path, tmp_path: Path, cli: Cli, args: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    words = [word.replace("FILE", str(tmp_path / "file")) for word in args]
    words = [str(tmp_path / "absent")] if args == ("ABSENT",) else [str(tiny_engine), *words]
    found, out, err = cli("bench", *words)
    assert (found, out, err.count("\n")) == (code, "", 1) and message in err
