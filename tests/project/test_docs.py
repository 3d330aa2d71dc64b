"""The documents describe the code that is there."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import typer.main
from rich.console import Console

from ddtree_trt import LLM
from ddtree_trt.cli import app
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.engines.exactness import REASONS
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import build_tree, descend
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.terminal.console import TreeView
from ddtree_trt.triton.export import export_triton

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


# Whoever copies an example from the documents sees the tiny pair answer, not stammer one token a round


WITH_PROMPTS = (
    "README.md",
    *(f"docs/{n}.md" for n in ("coming-from-vllm", "deployment", "generation", "serving", "tutorial")),
)
OTHERS = ("cpp_plugins/README.md", "deploy/Containerfile", "docs/gpu.md")
LEAST_PER_ROUND = 3.0
FENCED = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A prompt stands behind one of these, in a shell, in JSON or in Python. A ChatML prompt is given as it is.
PROMPT = re.compile(
    r"(?:--prompt |-p |question = |task = |\"role\": \"user\", \"content\": |\"text_input\": |-d '\{\"prompt\": )"
    r"(\"(?:[^\"\\]|\\.)*\")"
)


def prompts_in(text: str) -> set[str]:
    """Those for the tiny pair's engines. What a hint answers is a bad one on purpose."""
    blocks = [block.replace("\\\n", " ") for block in FENCED.findall(text)] or [text]
    lines = [line for block in blocks if "\nhint: " not in block for line in block.splitlines()]
    ours = [line for line in lines if not re.search(r"engines/(?!tiny)", line)]
    found = {json.loads(prompt) for line in ours for prompt in PROMPT.findall(line)}
    return {prompt for prompt in found if prompt != "…" and "$" not in prompt}


def test_prompts_of_documents(llm: LLM, tiny_engine: Path, tmp_path: Path) -> None:
    found = {page: prompts_in((ROOT / page).read_text(encoding="utf-8")) for page in WITH_PROMPTS}
    for layout in ("trtllm", "vllm"):
        exported = export_triton(tiny_engine, tmp_path, layout, layout=layout) / "README.md"
        found[layout] = prompts_in(exported.read_text(encoding="utf-8"))
    assert all(found.values()), "a document whose examples are no longer understood does not pass by having none"
    others = [prompts_in((ROOT / page).read_text(encoding="utf-8")) for page in OTHERS]
    for prompt in sorted(set().union(*found.values(), *others)):
        asked: Any = prompt if "<|im_start|>" in prompt else [{"role": "user", "content": prompt}]
        output = llm.generate([asked], SamplingParams(max_tokens=512, tree_budget=32))[0]
        said = output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop", f"{prompt!r} has no end: {said!r}"
        assert output.metrics.mean_acceptance_length >= LEAST_PER_ROUND, f"{prompt!r} is answered slowly: {said!r}"


# The example of docs/concepts.md is what the code gives


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")


class Words:
    """A codec whose tokens are the words of the page."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids)


def candidates() -> tuple[list[list[str]], np.ndarray]:
    """The page's table by position: words and probabilities, [3, 3] each."""
    rows = re.findall(r"^\| (`.+?) \|$", PAGE, re.MULTILINE)
    cells = [[re.fullmatch(r"`(.+)` ([\d.]+)", cell) for cell in row.split(" | ")] for row in rows]
    found = [[(c[1], float(c[2])) for c in row if c] for row in cells]
    assert [len(row) for row in found] == [3, 3, 3]
    columns = list(zip(*found, strict=True))
    return [[w for w, _ in column] for column in columns], np.array([[p for _, p in column] for column in columns])


def test_the_drawn_tree() -> None:
    words, probs = candidates()
    all_words = [*(word for column in words for word in column), " France", " capital"]
    target = {" France": " is", " is": " the", " the": " capital"}  # what the page has the target choose
    tree = build_tree(np.log(probs.astype(np.float32)), np.arange(9, dtype=np.int32).reshape(3, 3), 8)

    def choose(node: int) -> int:
        word = all_words[int(tree.token_ids[node - 1])] if node else " France"
        return all_words.index(target[word])

    path = descend(tree, choose)
    text = io.StringIO()
    view = TreeView(cast(TextCodec, Words(all_words)), Console(file=text, width=100, highlight=False))
    view(Round(9, tree, path, 10, None))
    drawn = re.search(r"<!-- tree -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert drawn is not None
    assert text.getvalue().strip() == drawn[1].strip()


def test_the_stated_expectations() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    _, probs = candidates()
    assert np.allclose(names["marginals"], probs)
    nodes = np.exp(names["tree"].log_weights).sum()
    chain = np.cumprod(probs[:, 0]).sum()
    assert f"add up to {nodes:.2f}" in PAGE
    assert f"{1 + nodes:.2f} tokens a round are expected" in PAGE and f"# {1 + nodes:.2f}" in block[1]
    assert f"comes to {1 + chain:.2f}" in " ".join(PAGE.split())


# The documentation as a site: it builds without a warning


pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")


# Of the extra [dev] and of those that only run engines: `make docs` installs none of them.
NOT_INSTALLED = ("fastapi", "gguf", "httpx", "hypothesis", "llguidance", "openai", "prometheus_client", "ray", "torch")


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with the packages of the extra [docs] alone."""
    absent = site.parent / "absent"
    absent.mkdir()
    for name in NOT_INSTALLED:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}')\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(absent)}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, site)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return site


def test_the_site_builds_without_a_warning(site: Path) -> None:
    command_line = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in ("ddtree-trt run", "ddtree-trt bench", "--tree-budget", "--list-examples"):
        assert name in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "AsyncLLM", "RequestOutput", "mean_acceptance_length", "UsageError"):
        assert re.search(rf'id="[\w.]*\b{name}"', python), name
    assert 'data-md-component="source"' not in command_line  # it asks GitHub for stars
    assert '<script src="http' not in command_line and "fonts.googleapis" not in command_line
