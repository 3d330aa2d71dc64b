"""The documents describe the code that is there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ddtree_trt.cli import app

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


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {n: {o for p in c.params for o in [*p.opts, *p.secondary_opts]} | {"--help"} for n, c in COMMANDS.items()}


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


# The documentation as a site: it builds without a warning


pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")


# Of the extra [dev] and of those that only run engines: `make docs` installs none of them.
NOT_INSTALLED = ("gguf", "hypothesis", "llguidance", "openai", "prometheus_client", "ray", "starlette", "torch")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    absent, site = tmp_path / "absent", tmp_path / "site"
    absent.mkdir()
    for name in NOT_INSTALLED:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}')\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(absent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    command_line = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in ("ddtree-trt run", "ddtree-trt bench", "--tree-budget", "--list-examples"):
        assert name in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "AsyncLLM", "RequestOutput", "mean_acceptance_length", "UsageError"):
        assert re.search(rf'id="[\w.]*\b{name}"', python), name
    assert 'data-md-component="source"' not in command_line  # it asks GitHub for stars
    assert '<script src="http' not in command_line and "fonts.googleapis" not in command_line
