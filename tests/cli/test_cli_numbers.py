"""Every number the command line takes: nonsense is one line that names it, never dropped, clamped or a traceback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.records import flag_of, options
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
    "serve": "ENGINE --replicas 2",
}
RECORDS: dict[str, tuple[type, ...]] = {
    "bench": (BenchSettings,),
    "run": (EngineOptions,),
    "serve": (ServeOptions, ReplicaOptions),
}
# Of options that are no record's, and what the bounds of a record do not say.
MORE = {
    **{f"build {name}": ("0", "x") for name in ("--max-seq-len", "--max-tree-budget", "--max-batch")},
    **{"check --limit": ("0",), "check --max-tokens": ("0", "5000"), "export-triton --instances": ("0",)},
    "bench --budgets": ("-1", "0", str(10**30), "x", "4,0", "1.5"),
    "export-triton --gpus": ("-1", str(10**30), "x", "0,0"),
    "run --example": ("0", "9", "x"),
    "run --max-tokens": ("0", "100000", "-1", "1.5"),
    "run --temperature": ("-1", "101", "nan", "inf"),
    "run --top-p": ("0", "2", "nan"),
    "run --top-k": ("-1", str(10**30)),
    "run --seed": ("-1", str(2**64)),
    "run --tree-budget": ("-1", str(10**30), "x", "257", "1.5"),
    "run-batch --seed": ("-1", str(2**64)),
    "run-batch --max-replicas": ("1",),  # fewer than the replicas
    "run --threads": ("x", "1.5"),
}


def cases() -> Iterator[tuple[str, str]]:
    """A command with its option, and a value that it refuses."""
    for name, values in MORE.items():
        yield from ((name, value) for value in values)
    for command, records in RECORDS.items():
        for field, (option, _, _) in [pair for record in records for pair in options(record).items()]:
            if option.within:
                lowest, highest = option.within
                yield from ((f"{command} {flag_of(field, option)}", str(n)) for n in (lowest - 1, highest + 1, "nan"))


@pytest.mark.parametrize(("name", "value"), [*cases()])
def test_nonsense_is_refused_by_name(cli: Cli, tiny_engine: Path, tmp_path: Path, name: str, value: str) -> None:
    command, option = name.split()
    words = ARGUMENTS[command].replace("ENGINE", str(tiny_engine)).replace("FOLDER", str(tmp_path)).split()
    result: Any = cli(command, *words, f"{option}={value}")
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400
    field = option[2:].replace("-", "_")
    assert any(name in err for name in (option, field, field.rstrip("s"), "no prompt of this run fits")), err
    assert list(tmp_path.iterdir()) == [], "nothing was written"
