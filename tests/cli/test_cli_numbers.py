"""Every number the command line takes: nonsense is one line that names it, never dropped, clamped or a traceback."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.cli import app
from ddtree_trt.records import options
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.serve.options import ReplicaOptions, ServeOptions

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
RECORDS: dict[str, tuple[type, ...]] = {
    "bench": (BenchSettings,),
    **dict.fromkeys(("check", "run"), (EngineOptions,)),
    **dict.fromkeys(("serve", "run-batch"), (ServeOptions, ReplicaOptions)),
}
# What the bounds of a record do not say: the model's, those of commands without one, and those of several options.
MORE = {
    **{("build", name): ("0",) for name in ("max_seq_len", "max_tree_budget", "max_batch")},
    **{("check", "limit"): ("0",), ("check", "max_tokens"): ("0", "5000"), ("export-triton", "instances"): ("0",)},
    ("bench", "budgets"): ("-1", "0", str(10**30), "x", "4,0", "1.5"),
    ("export-triton", "gpus"): ("-1", str(10**30), "x", "0,0"),
    ("run", "example"): ("0", "9"),
    ("run", "max_tokens"): ("0", "100000"),
    ("run", "top_p"): ("0",),
    ("run", "seed"): (str(2**64),),
    ("run", "tree_budget"): ("-1", str(10**30), "x", "257", "1.5"),
    ("run-batch", "seed"): (str(2**64),),
    ("run-batch", "max_replicas"): ("1",),  # fewer than the replicas
    ("serve", "max_replicas"): ("2",),  # without --replicas
    ("serve", "target_ongoing_requests"): ("8",),
}


def cases() -> Iterator[tuple[str, str, str]]:
    """(command, option, a value it refuses) of every option that takes a number, here or in a text."""
    for registered in app.registered_commands:
        callback: Any = registered.callback
        name = callback.__name__.replace("_", "-")
        bounds = {field: row[0].within for record in RECORDS.get(name, ()) for field, row in options(record).items()}
        for field, hint in typing.get_type_hints(callback, include_extras=True).items():
            kind, *infos = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
            values = list(MORE.get((name, field), ()))
            if numeric := {int, float} & {kind, *typing.get_args(kind)}:
                lowest, highest = bounds.get(field) or (0, 10**30 - 1)
                values += [str(lowest - 1), str(highest + 1)]
                values += ["nan", "inf", "-inf"] if float in numeric else []
            named = [word for info in infos for word in (info.default, *(info.param_decls or ())) if "--" in str(word)]
            yield from ((name, [*named, "--" + field.replace("_", "-")][0], value) for value in dict.fromkeys(values))


CASES = list(cases())


def test_numeric_options_are_found() -> None:
    found = {case[:2] for case in CASES}
    assert len(found) > 45 and {("serve", "--port"), ("run", "--top-k"), ("bench", "--temperature")} <= found


@pytest.mark.parametrize(("command", "option", "value"), CASES, ids=[" ".join(case) for case in CASES])
def test_nonsense_is_refused_by_name(
    cli: Cli, tiny_engine: Path, tmp_path: Path, command: str, option: str, value: str
) -> None:
    words = ARGUMENTS[command].replace("ENGINE", str(tiny_engine)).replace("FOLDER", str(tmp_path)).split()
    result: Any = cli(command, *words, f"{option}={value}")
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400
    field = option[2:].replace("-", "_")
    assert any(name in err for name in (option, field, field.rstrip("s"), "no prompt of this run fits")), err
    assert list(tmp_path.iterdir()) == [], "nothing was written"
