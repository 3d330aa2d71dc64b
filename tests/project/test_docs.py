"""The documents describe the code that is there."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ddtree_trt.cli import app
from ddtree_trt.runtime.engines.exactness import REASONS
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("tools/*/README.md")])


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
        there = path.parent / target if target else path
        made = there.name == "cli.md"  # by tools/documents/docs_site.py
        assert made or there.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}#{anchor}"


def test_every_reason_not_to_be_exact_is_in_the_table() -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    assert [reason for reason in REASONS if f"| {reason} |" not in text] == []


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {
    name: {o for p in c.params for o in [*p.opts, *p.secondary_opts]} | {"--help"} for name, c in COMMANDS.items()
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_options_and_targets_are_there(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # it names what went, too
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:\$ )?(?:[\w./-]*/)?ddtree-trt ([a-z][^\n#]*)", blocks, re.MULTILINE)
    for line in lines + re.findall(r"`ddtree-trt ([a-z][^`\n]+)`", text):
        name, *words = line.split()
        given = {word for word in words if re.match(r"--[a-z]", word)}
        assert name in COMMANDS and given <= OPTIONS[name], line
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*re.findall(r"(?:`|^\$ )make ([\w-]+)", text, re.MULTILINE)} <= {*rules}


def test_options_named_in_messages_are_there() -> None:
    """What an error or a help text tells to give."""
    known = {"--debug", "--version"}.union(*OPTIONS.values())
    foreign = {
        *("--config", "--port", "--revision", "--local-dir"),  # of servers and the hub's program
        *("--query-gpu", "--format", "--gpus"),  # of nvidia-smi and docker
        "--no",  # the beginning of a switch
        *("--editable", "--force-reinstall", "--index-url", "--no-deps", "--pre"),  # pip's
    }
    for path in (ROOT / "ddtree_trt").rglob("*.py"):
        named = re.findall(r"(?<![\w-])(--[a-z][a-z-]*[a-z])", path.read_text(encoding="utf-8"))
        assert {*named} <= known | foreign, path


def test_parameters_and_drafters_have_their_words() -> None:
    table = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8").split("## Parameters")[1].split("\n\n")[1]
    documented = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == {field.name for field in dataclasses.fields(SamplingParams)}
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    for fixture in (ROOT / "tests" / "fixtures" / "drafters").glob("*.json"):
        assert json.loads(fixture.read_text())["checkpoint"] in page


def test_defaults_beside_vllm_s_are_ours() -> None:
    page = (ROOT / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8").split("## Defaults")[1].split("##")[0]
    ours = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in page.splitlines() if row.startswith("| ")}
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    assert ours["`temperature`"].startswith(f"{fields['temperature'].default:g}:")
    assert (fields["top_k"].default, fields["top_p"].default, fields["min_p"].default) == (0, 1.0, 0.0)
    table = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    assert f"Unless given: {ours['`max_tokens` in Python']}." in table
    assert ours["host of the server"] == ServeOptions().host
