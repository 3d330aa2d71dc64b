"""`--help` of every command in a terminal of 80 columns: options as they are given, and no word cut off."""

import re
from typing import Any

import pytest
import typer.main
from command_line import Cli

from ddtree_trt.cli import app

MAIN: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {"": MAIN, **MAIN.commands}


def joined(text: str) -> str:
    """A text without its line breaks, which may also stand behind a hyphen or within a long word."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize(("name", "command"), COMMANDS.items(), ids=COMMANDS)
def test_it_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, command: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(*name.split(), "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out and "..." not in re.sub(r"\[ARGS\]\.\.\.|\}\.\.\.", "", out)
    whole = joined(out)
    assert joined(command.help.replace("\n\n", " ")) in whole
    for parameter in command.params:
        assert all(option in whole for option in parameter.opts if option.startswith("-"))
        assert parameter.help and joined(parameter.help) in whole, f"{parameter.name} has no whole help text"
    for below in getattr(command, "commands", {}).values():
        first, *_ = re.split(r"(?<=\.)\s", below.help)
        assert re.search(rf"^  {below.name} +{re.escape(first)}$", out, re.MULTILINE), below.name
    assert re.search(r"^  --help +Show this message and exit\.$", out, re.MULTILINE)
    for flag in (p for p in command.params if getattr(p, "is_flag", False)):  # which take no value
        (line,) = re.findall(rf"^  (?:-\w, )?{flag.opts[0]}(?: .*)?$", out, re.MULTILINE)
        shown, *_ = re.split(r"  +", line.strip())
        assert shown == " / ".join([*flag.opts, *flag.secondary_opts])
    assert not re.search(r"<(?:bool|str|int|float)>", out)
