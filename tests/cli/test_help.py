"""`--help` of every command in a terminal of 80 columns: options as they are given, and no word cut off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from command_line import Cli

from ddtree_trt.cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups among them."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = [(path, command) for path, command in commands(typer.main.get_command(app)) if path != ("bench",)]
EVERY = pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=lambda p: " ".join(p) if isinstance(p, tuple) else ""
)


def joined(text: str) -> str:
    """A text without its line breaks, which may also stand behind a hyphen or within a long word."""
    return re.sub(r"\s+", "", text)


@EVERY
def test_it_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(*path, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out and "..." not in re.sub(r"\[ARGS\]\.\.\.|\}\.\.\.", "", out)
    whole = joined(out)
    assert joined(command.help.replace("\n\n", " ")) in whole
    for parameter in command.params:
        assert all(name in whole for name in parameter.opts if name.startswith("-"))
        assert parameter.help and joined(parameter.help) in whole, f"{parameter.name} has no whole help text"
    for name, below in getattr(command, "commands", {}).items():
        first, *_ = re.split(r"(?<=\.)\s", below.help)
        assert re.search(rf"^  {name} +{re.escape(first)}$", out, re.MULTILINE), name


@EVERY
def test_flags_take_no_value(cli: Cli, path: tuple[str, ...], command: Any) -> None:
    out = cli(*path, "--help")[1]
    flags = [p for p in command.params if getattr(p, "is_flag", False)]
    assert re.search(r"^  --help +Show this message and exit\.$", out, re.MULTILINE)
    for flag in flags:
        (line,) = re.findall(rf"^  (?:-\w, )?{flag.opts[0]}(?: .*)?$", out, re.MULTILINE)
        shown, *_ = re.split(r"  +", line.strip())
        assert shown == " / ".join([*flag.opts, *flag.secondary_opts])
    assert not re.search(r"<(?:bool|str|int|float)>", out)
