"""`ddtree-trt run` as a user meets it: prompts from everywhere, comparison, trees, JSON, and clear refusals."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Cli
from pacing import WAIT_S

from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.terminal import console

QUESTION = "Lars has 9 keys. Lenlot has double that number. What number of keys does Lenlot have?"


@pytest.mark.parametrize(("load", "busy"), [(0.5, False), (1e4, True)])
def test_compare_proves_the_output_is_the_targets_and_says_of_a_busy_machine(
    cli: Cli, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, load: float, busy: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(console, "REPETITIONS", 1)
    request = ("run", tiny_engine, "--prompt", QUESTION, "--compare", "--max-tokens", 40)
    code, out, err = cli(*request)
    assert (code, err) == (0, "") and "identical: yes" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["ar"], ["dflash"], ["ddtree"])]
    assert [r[0] for r in rows] == ["ar", "dflash", "ddtree"]
    assert len({r[1] for r in rows}) == 1, "every method makes the same number of tokens"
    code, drawn, err = cli(*request, "--method", "dflash-sample", "--temperature", 1, "--seed", 1)
    assert (code, err) == (0, "") and "dflash-sample draw their own tokens, of the same distribution" in drawn
    last = out.splitlines()[-1]
    assert (last != "identical: yes") is busy
    assert not busy or (last.startswith("The machine was busy: load 10000.00 on ") and "Do not trust" in last)


def test_every_source_of_a_prompt_gives_same_text(cli: Cli, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION))
    options = ("--json", "--max-tokens", 24)
    sources: tuple[tuple[str, ...], ...] = (("--prompt", QUESTION), (), ("--raw", "--prompt", QUESTION))
    given, piped, raw = (json.loads(cli("run", tiny_engine, *source, *options)[1]) for source in sources)
    assert given["outputs"][0]["text"] == piped["outputs"][0]["text"] != ""
    assert len(raw["prompt_token_ids"]) < len(given["prompt_token_ids"])
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    refusal = "error: stdin has no prompt; write one there, or give --prompt\n"
    assert cli("run", tiny_engine) == (2, "", refusal)


def test_exact_times_of_stages_wait_for_engine(cli: Cli, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, texts = [], []
    monkeypatch.setattr(OrtEngine, "synchronize", lambda engine: settled.append(True))
    for options in ((), ("--exact-stage-times",)):
        assert not settled
        out = cli("run", tiny_engine, "--prompt", QUESTION, "--max-tokens", 8, "--json", *options)[1]
        texts.append(json.loads(out)["outputs"][0]["text"])
    assert settled and texts[0] == texts[1]


def test_show_tree_draws_every_round(cli: Cli, tiny_engine: Path) -> None:
    show = ("run", tiny_engine, "--prompt", QUESTION, "--show-tree")
    code, out, err = cli(*show, "--tree-budget", 6, "--max-tokens", 20)
    assert code == 0, err
    assert "round 1: 6 nodes, committed" in out
    assert "✓" in out and "└──" in out
    assert "tokens/round" in out.splitlines()[-1]
    _, out, _ = cli(*show, "--max-tokens", 8, "--method", "ar")
    assert out.startswith("round 1: 0 nodes, committed 1: ") and out.count("\nround") == 6


def test_newest_engine_is_default(cli: Cli, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = "error: no engine under engines/; build one with: ddtree-trt build --target tiny\n"
    assert cli("run", "--prompt", "x") == (1, "", missing)
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "tiny").symlink_to(tiny_engine)
    assert cli("run", "--prompt", QUESTION, "--max-tokens", 4)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--max-tokens", "100000"], "max_tokens 100000 does not fit: the prompt leaves"),
        (["--prompt", "x", "--method", "draft-model"], "needs a drafter of kind autoregressive"),
        (["--prompt", "word " * 3000], "tokens, this engine takes at most"),
        (["--prompt", "x", "--compare", "--show-tree"], "--show-tree trees; give one of them"),
        (["--prompt", "x", "--show-tree", "--json"], "--show-tree trees; give one of them"),
        (["--list-examples", "--json"], "--list-examples shows the engine's examples; give it alone"),
    ],
)
def test_wrong_calls_are_one_line_and_code_2(cli: Cli, tiny_engine: Path, options: list[str], message: str) -> None:
    code, out, err = cli("run", tiny_engine, *options)
    assert (code, out) == (2, "") and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}


@pytest.fixture
def text(cli: Cli, tiny_engine: Path) -> Any:
    def text(*options: object) -> str:
        code, out, err = cli("run", tiny_engine, "-p", "cards?", "--json", "--max-tokens", 200, *options)
        assert code == (2 if err else 0)
        return err or str(json.loads(out)["outputs"][0]["text"])

    return text


def test_every_form_of_constraint_is_an_option(text: Any, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "x" "y"')
    jsonschema.validate(json.loads(text("--json-schema", schema)), SCHEMA)
    jsonschema.validate(json.loads(text("--json-schema", json.dumps(SCHEMA))), SCHEMA)
    assert text("--json-object").startswith("{")
    assert text("--choice", "few", "--choice", "many") in ("few", "many")
    assert re.fullmatch("[a-c]{4}", text("--regex", "[a-c]{4}"))
    assert text("--grammar", grammar) == text("--grammar", 'start: "x" "y"') == "xy"


def test_constraints_that_are_refused(text: Any, tmp_path: Path) -> None:
    assert "--regex and --choice are two constraints on the output; give one" in text("--regex", "a", "--choice", "b")
    missing = text("--json-schema", tmp_path / "none.json")
    assert "cannot be read (No such file or directory); name a file, or give the text" in missing
    assert "structured: regex '(a' cannot be used" in text("--regex", "(a")
    assert "structured: regex must be a text that is not empty" in text("--regex", "")
    late = text("--regex", "[0-9]{12}(a{1000}){1000}")
    assert late.startswith("error: structured: the output could not be matched") and "max_lexer_states" in late


# A background process begins with SIGINT ignored, hence the first handler.
COMMAND = [
    *(sys.executable, "-c"),
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from ddtree_trt.__main__ import main; main()",
]


@pytest.mark.parametrize("name", ["run", "build"])
def test_ctrl_c_is_silent_and_leaves_nothing(tiny_engine: Path, tmp_path: Path, name: str) -> None:
    """While `run` writes its answer, and while `build` writes its files."""
    words = {
        "run": ["run", str(tiny_engine), *"--prompt x --max-tokens 1900 --ignore-eos --method ar".split()],
        "build": ["build", "--target", "tiny", "--backend", "onnxruntime", "--output", str(tmp_path / "engine")],
    }
    profile = (tiny_engine / "profile.json").read_text()
    with subprocess.Popen([*COMMAND, *words[name]], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if name == "run":
            process.stdout.read(1)
        else:
            while not list(tmp_path.glob(".engine.tmp-*/weights.bin")):
                assert process.poll() is None
                time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, b"")
    assert list(tmp_path.iterdir()) == []
    assert (tiny_engine / "profile.json").read_text() == profile
