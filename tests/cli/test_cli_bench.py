"""`ddtree-trt bench` and `ddtree-trt check` as commands: what they accept, write and end with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from bench_results import make_result, make_sample
from typer.testing import CliRunner

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.pairs.random_pair import SHAPES
from ddtree_trt.bench.paper_datasets import PAPER_SETS
from ddtree_trt.bench.peers.registry import HELP
from ddtree_trt.bench.result import read_result, to_json
from ddtree_trt.bench.settings import Shard
from ddtree_trt.cli import Commands
from ddtree_trt.commands import bench
from ddtree_trt.commands.check import check
from ddtree_trt.runtime.engines.profile import fingerprint

app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
app.add_typer(bench.app, name="bench")
app.command()(check)


@app.callback()
def options(debug: bool = False) -> None:
    pass


def call(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


QUICK = ("--limit", 2, "--max-tokens", 8, "--budgets", "4")


def test_a_run_is_shown_and_kept(tiny_engine: Path, tmp_path: Path) -> None:
    files = {"json": "new/r.json", "markdown": "r.md", "latex": "r.tex"}
    outputs = [part for name, file in files.items() for part in (f"--{name}", tmp_path / file)]
    code, out, err = call("bench", tiny_engine, *QUICK, *outputs)
    assert (code, err) == (0, "")
    for word in ("ar", "dflash", "ddtree@4", "tokens/s", "τ", "milliseconds per round by stage"):
        assert word in out
    result = read_result(tmp_path / "new/r.json")
    assert result.prompt_count == 2
    assert "| ddtree@4 |" in (tmp_path / "r.md").read_text()
    assert r"\begin{tabular}" in (tmp_path / "r.tex").read_text()


def test_a_run_measures_the_exact_engine_or_the_other(tiny_engine: Path) -> None:
    fingerprints = {}
    for option, exact in (("--exact", True), ("--no-exact", False)):
        code, out, _ = call("bench", tiny_engine, *QUICK, option, "--json", "-")
        result = json.loads(out)
        assert (code, result["settings"]["exact"]) == (0, exact)
        fingerprints[exact] = result["engine"]["fingerprint"]
    assert fingerprints[True] != fingerprints[False] == fingerprint(load_manifest(tiny_engine), 1)


def test_json_on_stdout_is_nothing_but_json(tiny_engine: Path) -> None:
    code, out, err = call("bench", tiny_engine, *QUICK, "--json", "-", "--temperatures", "0,1")
    assert (code, err) == (0, "")
    assert json.loads(out)["settings"]["temperatures"] == [0.0, 1.0]


def test_a_replay_prints_ratios(tiny_engine: Path, tmp_path: Path) -> None:
    assert call("bench", tiny_engine, *QUICK, "--json", tmp_path / "r.json")[0] == 0
    code, out, _ = call("bench", "--replay", tmp_path / "r.json")
    assert code == 0
    assert "now over then" in out
    assert "×" in out.partition("now over then")[2]
    code, _, err = call("bench", "--replay", tmp_path / "r.json", "--max-tokens", 9)
    assert code == 2
    assert "takes its settings from the file" in err


def test_shards_are_merged_and_shown(tmp_path: Path) -> None:
    paths = []
    for i in (1, 2):
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(to_json(make_result(make_sample("ar", f"set/{i}"), shard=Shard(i, 2))))
    code, out, _ = call("bench", "merge", *paths, "--json", tmp_path / "all.json")
    assert code == 0
    assert "set, temperature 0 (2 prompts)" in out
    assert len(read_result(tmp_path / "all.json").parts) == 2
    code, _, err = call("bench", "merge", paths[0])
    assert code == 2
    assert "shard 2/2 is missing" in err
    code, out, _ = call("bench", "report", tmp_path / "all.json", "--latex", "-")
    assert code == 0
    assert out.startswith(r"\begin{tabular}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--budgets", "4,many"), "--budgets must be numbers and auto"),
        (("--temperatures", "hot"), "--temperatures must be numbers"),
        (("--shard", "3/2"), "--shard takes i/n"),
        (("--methods", "magic"), "method must be one of"),
        (("--prompts", "absent.jsonl"), "no prompts called 'absent.jsonl'"),
        (("--peer", "vllm"), "unknown peer 'vllm'"),
        (("--random-weights", "micro"), "give no ENGINE_DIR"),
        (("--max-tokens", "0"), "max_tokens must be from 2 to"),
    ],
)
def test_a_wrong_call_ends_with_two(tiny_engine: Path, args: tuple[str, ...], message: str) -> None:
    code, out, err = call("bench", tiny_engine, *args)
    assert (code, out) == (2, "")
    assert message in err


def test_what_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("bench", tmp_path / "no-engine", "--json", tmp_path / "file" / "r.json")
    assert code == 2
    assert "cannot write into" in err


def test_an_absent_engine_ends_with_one(tmp_path: Path) -> None:
    code, _, err = call("bench", tmp_path / "absent")
    assert code == 1
    assert "build one there with" in err


def test_help_lists_what_there_is() -> None:
    code, out, _ = call("bench", "--help")
    assert code == 0
    text = " ".join(out.split()).replace("- ", "-")  # lines break behind hyphens too
    for name in (*PAPER_SETS, *(part.partition("=")[0] for part in HELP.replace(" or ", ", ").split(", "))):
        assert name in text
    for shape in SHAPES:
        assert shape.removeprefix("qwen3") in text
    assert "ddtree-trt bench merge" in text and "ddtree-trt bench load" in text


def test_check_reports_and_ends_with_the_verdict(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ("--limit", 3, "--max-tokens", 128, "--seeds", 0)
    code, out, _ = call("check", tiny_engine, *quick)
    assert code == 0
    assert out.endswith("passed\n")
    monkeypatch.setattr("ddtree_trt.check.findings.GreedyFinding.passed", False)
    code, out, _ = call("check", tiny_engine, *quick, "--json")
    assert code == 1
    assert json.loads(out)["passed"] is False


def test_the_commands_load_nothing_heavy() -> None:
    script = "import sys, ddtree_trt.commands.bench, ddtree_trt.commands.check; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "onnxruntime", "transformers", "torch", "matplotlib"} & set(out.split())
