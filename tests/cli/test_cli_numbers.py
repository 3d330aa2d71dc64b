"""Every number the command line takes: nonsense is one line that names it, never dropped, clamped or a traceback."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree_trt.cli import app

# What stands beside the option: a call that is right without it. ENGINE is the tiny engine, FOLDER an empty directory.
ARGUMENTS = {
    "bench": "ENGINE --limit 1 --max-tokens 4 --budgets 4",
    "build": "--target tiny --output FOLDER/engine --no-profile",
    "check": "ENGINE --limit 1 --seeds 0 --max-tokens 4",
    "export-triton": "ENGINE FOLDER/models",
    "run": "ENGINE --prompt x",
    "run-batch": "ENGINE --replicas 2 --input-file FOLDER/in.jsonl --output-file FOLDER/out.jsonl",
    "serve": "ENGINE",
}
HUGE = str(10**30)
NO_COUNT = ("-1", HUGE)
NO_SIZE = ("0", "-1", HUGE)
NO_REAL = ("-1", HUGE, "nan", "inf", "-inf")

# Option of a command → the values it refuses. Every option that takes a number is here.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("bench", "--limit"): NO_SIZE,
    ("bench", "--max-tokens"): ("1", *NO_SIZE),
    ("bench", "--repeats"): NO_SIZE,
    ("bench", "--temperature"): NO_REAL,
    ("bench", "--seed"): (*NO_COUNT, str(2**64)),
    ("bench", "--tensor-parallel-size"): (*NO_SIZE, "65"),
    ("bench", "--threads"): NO_COUNT,
    ("build", "--max-seq-len"): ("1", *NO_SIZE),
    ("build", "--max-tree-budget"): NO_SIZE,
    ("build", "--max-batch"): NO_SIZE,
    ("check", "--limit"): NO_SIZE,
    ("check", "--max-tokens"): ("5000", *NO_SIZE),
    ("check", "--seeds"): NO_COUNT,
    ("check", "--tensor-parallel-size"): (*NO_SIZE, "65"),
    ("check", "--threads"): NO_COUNT,
    ("export-triton", "--instances"): NO_SIZE,
    ("export-triton", "--max-queue"): NO_COUNT,
    ("run", "--example"): ("9", *NO_SIZE),
    ("run", "--max-tokens"): ("100000", *NO_SIZE),
    ("run", "--temperature"): NO_REAL,
    ("run", "--top-k"): NO_COUNT,
    ("run", "--top-p"): ("0", *NO_REAL),
    ("run", "--min-p"): NO_REAL,
    ("run", "--seed"): (*NO_COUNT, str(2**64)),
    ("run", "--tensor-parallel-size"): (*NO_SIZE, "65"),
    ("run", "--threads"): NO_COUNT,
    ("run-batch", "--seed"): (*NO_COUNT, str(2**64)),
    ("run-batch", "--threads"): NO_COUNT,
    ("run-batch", "--tensor-parallel-size"): (*NO_SIZE, "65"),
    ("run-batch", "--replicas"): NO_SIZE,
    ("run-batch", "--max-replicas"): ("1", *NO_SIZE),  # fewer than the replicas
    ("run-batch", "--cpus-per-replica"): NO_REAL,
    ("run-batch", "--gpus-per-replica"): NO_REAL,
    ("serve", "--port"): (*NO_COUNT, "65536"),
    ("serve", "--max-requests"): NO_SIZE,
    ("serve", "--max-waiting"): NO_COUNT,
    ("serve", "--max-body-bytes"): NO_SIZE,
    ("serve", "--default-max-tokens"): NO_SIZE,
    ("serve", "--request-timeout"): NO_REAL,
    ("serve", "--stall-timeout"): ("0", *NO_REAL),
    ("serve", "--drain-timeout"): NO_REAL,
    ("serve", "--tensor-parallel-size"): (*NO_SIZE, "65"),
    ("serve", "--threads"): NO_COUNT,
    ("serve", "--replicas"): NO_SIZE,
    ("serve", "--max-replicas"): ("2", *NO_SIZE),  # without --replicas
    ("serve", "--target-ongoing-requests"): ("8", *NO_REAL),
    ("serve", "--cpus-per-replica"): ("1", *NO_REAL),
    ("serve", "--gpus-per-replica"): ("1", *NO_REAL),
}
# Numbers that are given as text.
IN_TEXT: dict[tuple[str, str], tuple[str, ...]] = {
    ("bench", "--budgets"): (*NO_SIZE, "x", "4,0", "1.5"),
    ("export-triton", "--gpus"): (*NO_SIZE, "x", "0,0"),
    ("run", "--tree-budget"): (*NO_COUNT, "x", "257", "1.5"),
}


def numeric_options() -> Iterator[tuple[str, str]]:
    """Every (command, option) whose value is an integer or a real number."""
    for command in app.registered_commands:
        callback: Any = command.callback
        name = command.name or callback.__name__.replace("_", "-")
        for option, hint in typing.get_type_hints(callback, include_extras=True).items():
            kind, *infos = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
            if {int, float} & {kind, *typing.get_args(kind)}:
                named = [w for i in infos for w in (i.default, *(i.param_decls or ())) if str(w).startswith("--")]
                yield name, (named or ["--" + option.replace("_", "-")])[0]


def test_every_numeric_option_is_in_the_table() -> None:
    assert set(numeric_options()) == set(REFUSED)


CASES = [(*option, value) for option, values in (REFUSED | IN_TEXT).items() for value in values]


@pytest.mark.parametrize(("command", "option", "value"), CASES, ids=[" ".join(case) for case in CASES])
def test_nonsense_is_refused_by_name(tiny_engine: Path, tmp_path: Path, command: str, option: str, value: str) -> None:
    words = ARGUMENTS[command].replace("ENGINE", str(tiny_engine)).replace("FOLDER", str(tmp_path)).split()
    result: Any = CliRunner().invoke(app, [command, *words, f"{option}={value}"])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and len(result.stderr) < 400
    names = {
        option,
        option[2:].replace("-", "_"),
        option[2:].replace("-", "_").rstrip("s"),
        "no prompt of this run fits",
    }
    assert any(name in result.stderr for name in names), result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was written"
