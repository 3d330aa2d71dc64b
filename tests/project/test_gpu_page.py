"""docs/gpu.md: what its commands name exists, and its figures are the ones that the code has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer.main

from ddtree_trt.build.choice import RTX_SMS
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.cli import app
from ddtree_trt.commands.build import build
from ddtree_trt.device.survey import CUDA, DRIVER
from ddtree_trt.doctor import diagnose
from ddtree_trt.plugins import LOWEST_SM

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line and not line.startswith("#")
]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
EXTRAS = set(
    re.findall(
        r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.MULTILINE
    )
)
# Programs of others, whose options are not ours to check.
FOREIGN = {"sudo", "nvidia-smi", "python3", "git", "export"}


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def fault(line: str) -> str | None:
    """What a command of the page names that is not there."""
    program, *rest = words(line)
    if program.endswith("/pip"):
        extra = next(iter(re.findall(r"^\.\[([\w-]+)\]$", rest[-1])), None)
        return f"no extra {extra}" if extra and extra not in EXTRAS else None
    if program == "make":
        rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if set(rest) <= set(rules) else f"no target of {rest}"
    if program.endswith(".sh"):
        return None if (ROOT / program).is_file() else f"no {program}"
    if program.endswith("/ddtree-trt"):
        return fault_of_ours(rest)
    return None if program in FOREIGN else f"unknown program {program}"


def fault_of_ours(rest: list[str]) -> str | None:
    name, *arguments = rest
    if name not in COMMANDS:
        return f"no command {name}"
    allowed = {
        **{f"--{field.replace('_', '-')}": get_args(hint) for field, hint in get_type_hints(build).items()},
        "--gpu": tuple(f"sm{sm}" for sm in RTX_SMS),
        "--target": tuple(PRESETS),
    }
    for option, value in zip(arguments, [*arguments, ""][1:], strict=True):
        if option.startswith("-") and option not in options_of(COMMANDS[name]):
            return f"{name} has no {option}"
        choices = [choice for choice in allowed.get(option, ()) if isinstance(choice, str)]
        if choices and value not in choices:
            return f"{option} is never {value}"
    return None


def options_of(command: Any) -> set[str]:
    """Options of a command and of the commands below it."""
    own = {option for p in command.params for option in [*p.opts, *p.secondary_opts]}
    return own.union(*(options_of(c) for c in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_one(line: str) -> None:
    assert fault(line) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (".venv/bin/ddtree-trt build --target qwen3-8b --backend tensorflow", "--backend is never tensorflow"),
        (".venv/bin/ddtree-trt build --target qwen3-8b --gpus sm89", "build has no --gpus"),
        (".venv/bin/ddtree-trt build --target qwen3-9b", "--target is never qwen3-9b"),
        (".venv/bin/ddtree-trt build --backend tensorrt-rtx --gpu sm90", "--gpu is never sm90"),
        (".venv/bin/pip install --editable '.[cuda]'", "no extra cuda"),
        ("make engines", "no target of ['engines']"),
        ("tools/no_such.sh", "no tools/no_such.sh"),
        ("conda install x", "unknown program conda"),
    ],
)
def test_a_command_that_is_none_is_found(line: str, found: str) -> None:
    assert fault(line) == found


def test_there_are_three_roads() -> None:
    built = {w[w.index("--backend") + 1] for line in LINES if "--backend" in (w := words(line))}
    installed = {extra for line in LINES for extra in re.findall(r"'\.\[([\w-]+)\]'", line)}
    assert built == installed == {"tensorrt-rtx", "tensorrt", "torch"}
    assert {line for line in LINES if line.startswith(("cpp_plugins/tests/run_gpu.sh", "tools/gpu_bench.sh"))}


def test_figures_are_the_code_s() -> None:
    assert f"**{DRIVER} or newer**" in PAGE and f"CUDA {CUDA}" in PAGE
    row = next(line for line in PAGE.splitlines() if line.startswith("| [TensorRT for RTX]"))
    assert re.findall(r"\b\d+\.\d\b", row) == [str(sm / 10) for sm in RTX_SMS]
    for road in ("TensorRT", "PyTorch"):
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| [{road}]"))
        assert f"{LOWEST_SM / 10} or newer" in row


def test_what_doctor_is_quoted_with_is_what_it_says() -> None:
    names = {check.name for check in diagnose().checks}
    quoted = [
        name
        for line in re.findall(r'# "yes(?:"| +)(?: before )?(.*?)"?$', PAGE, re.MULTILINE)
        for name in line.split(", ")
    ]
    assert len(quoted) >= 7 and set(quoted) <= names


def test_messages_of_the_table_are_those_of_the_code() -> None:
    sources = "".join(
        p.read_text(encoding="utf-8")
        for p in [*(ROOT / "ddtree_trt").rglob("*.py"), ROOT / "cpp_plugins" / "build_plugins.sh"]
    )
    table = PAGE.split("| says | means |")[1].split("\n\n")[0]
    said = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(said) == 5
    for message in said:
        # Without what is filled in: names, numbers.
        fixed = re.split(r"…|backend onnxruntime: |NVIDIA's driver |libddtree_\w+\.so|left out |580|GPU(?=')", message)
        assert max(fixed, key=len).strip() in sources, message
