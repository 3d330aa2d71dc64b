"""What the documents name exists: files, commands and options, make targets, metrics, environment names, parameters."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ddtree_trt.cli import app
from ddtree_trt.errors import install_with
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *(p for pattern in ("*.md", "docs/*.md", "cpp_plugins/*.md", "tools/*/*.md") for p in ROOT.glob(pattern)),
        ROOT / "triton_repo" / "model" / "README.md",
    ]
)
DOCUMENTS.remove(ROOT / "CHANGELOG.md")  # it names what went, too
FOLDERS = ("ddtree_trt", "tools", "triton_repo", "workbench")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))

ENDINGS = "py|pyi|sh|md|cpp|cu|cuh|h|yaml|json|jsonl|toml|txt|pbtxt|onnx|bin|safetensors|so|png|svg"
FILE = re.compile(rf"`((?:[\w.-]+/)*[\w.-]+\.(?:{ENDINGS}))`")
# What a build, an export or a training writes, and what checkpoints have.
MADE = {
    *("config.json", "profile.json", "shared.safetensors", "weights.safetensors", "weights.bin", "target.onnx"),
    *("config.pbtxt", "export.json", "evaluation.json", "evaluation.md", "verified.json", "answers.jsonl"),
    *("config.yaml", "plain.yaml"),  # an export for TensorRT-LLM
    *("libddtree_plugins.so", "libddtree_torch.so"),
}
MADE_UNDER = ("WORK/", "OUT/", "build/", "engines/")


def options_of(command: Any) -> set[str]:
    """Options of a command and of the commands below it."""
    own = {option for p in command.params for option in [*p.opts, *p.secondary_opts]}
    return own.union({"--help"}, *(options_of(c) for c in getattr(command, "commands", {}).values()))


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {name: options_of(command) for name, command in COMMANDS.items()}
EVERY_OPTION = set[str]().union(
    *OPTIONS.values(), {"--version", "--debug", "--install-completion", "--show-completion"}
)
FOREIGN = {  # options of other programs
    *("--exit-on-error", "--exit-timeout-secs"),  # tritonserver
    "--no-deps",  # pip
    *("--reference", "--cpu-clock", "--document"),  # tools/
    *("--speculative-config", "--max-model-len", "--max-num-seqs", "--dtype", "--quantization"),  # vLLM
    *("--gpu-memory-utilization", "--data-parallel-size", "--enable-auto-tool-choice", "--tool-call-parser"),  # vLLM
    "--generation-config",  # vLLM
}


FOREIGN |= {
    option
    for path in SOURCES
    if path.is_relative_to(ROOT / "workbench") or path.is_relative_to(ROOT / "tools")
    for option in re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8"))
}


@cache
def names_in_the_tree() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    return {Path(file).name for file in files}


def is_there(name: str, folder: Path) -> bool:
    if "/" not in name:
        return name in names_in_the_tree() | MADE
    places = (ROOT, folder, ROOT / "ddtree_trt", ROOT / "cpp_plugins", ROOT / "tools")
    return name in MADE or name.startswith(MADE_UNDER) or any((place / name).exists() for place in places)


@each_document
def test_files_named_in_documents(path: Path) -> None:
    assert [n for n in FILE.findall(path.read_text(encoding="utf-8")) if not is_there(n, path.parent)] == []


def test_files_named_in_sources() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in FILE.findall(path.read_text(encoding="utf-8"))
        if not is_there(name, path.parent)
    }
    assert missing == set()


@each_document
def test_commands_and_options(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    wrong = []
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    in_blocks = re.findall(r"^(?:\$ )?(?:[\w./-]*/)?ddtree-trt ([^\n#]*)", fenced, re.MULTILINE)
    for line in in_blocks + re.findall(r"`ddtree-trt ([^`\n]+)`", text):
        name, *words = line.split()
        if name not in COMMANDS and not name.startswith("--"):
            wrong.append(line)
        wrong += [f"{name} {w}" for w in words if re.match(r"--?[a-z]", w) and w not in OPTIONS.get(name, EVERY_OPTION)]
    wrong += [o for o in re.findall(r"`(--[a-z][\w-]*)", text) if o not in EVERY_OPTION | FOREIGN]
    assert wrong == []


def test_options_named_in_messages() -> None:
    """Of the package: what an error or a help text tells to give must be an option."""
    foreign = {
        *("--config", "--port", "--revision", "--local-dir"),  # of servers and the hub's program
        *("--query-gpu", "--format"),  # nvidia-smi's
        "--no",  # the beginning of a switch
        *("--editable", "--force-reinstall", "--index-url", "--no-deps", "--pre"),  # pip's
    }
    wrong = {
        f"{path.relative_to(ROOT)}: {option}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "ddtree_trt")
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]*[a-z])", path.read_text(encoding="utf-8"))
        if option not in EVERY_OPTION | foreign
    }
    assert wrong == set()


@each_document
def test_make_targets(path: Path) -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"(?:`|^\$ )make ([\w-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= rules


def holds_everywhere(names: set[str], suffixes: tuple[str, ...] = ("py",)) -> set[str]:
    """Those of `names` that no source holds."""
    folders = (*FOLDERS, "cpp_plugins", "tests")
    files = [p for folder in folders for suffix in suffixes for p in (ROOT / folder).rglob(f"*.{suffix}")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files if "test_docs_names" not in p.name)
    return {name for name in names if name not in text}


@each_document
def test_metrics_and_environment_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    metrics = set(re.findall(r"\bddtree_[a-z_]+[a-z](?=[{}`,\[ )])", text)) - {"ddtree_trt"}
    shortened = {re.sub(r"^ddtree_|_total$|_sum$|_count$|_bucket$", "", name) for name in metrics}
    assert holds_everywhere({name for name in shortened if name}) == set()
    environment = set(re.findall(r"\bDDTREE_[A-Z_]+\b", text))
    assert holds_everywhere(environment, ("py", "sh", "txt", "cmake", "h")) == set()


def test_parameters_are_the_ones_there_are() -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    table = text.split("## Parameters")[1].split("\n\n")[1]
    documented = {n for row in table.splitlines()[2:] for n in re.findall(r"`(\w+)`", row.split("|")[1])}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert documented - fields == set()
    assert fields - documented == set()


def test_server_defaults_are_the_ones_there_are() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\d+)( MiB| s)? \|", text, re.MULTILINE)
    options = dataclasses.asdict(ServeOptions())
    for name, number, unit in rows:
        field = name.replace("-", "_") + ("_s" if unit == " s" else "")
        expected = options[field] / (2**20 if unit == " MiB" else 1)
        assert float(number) == expected, f"--{name}"
    assert len(rows) >= 6


def test_install_lines_are_those_that_work() -> None:
    """The package is on no index, and one function spells the line for messages. In a checkout only an editable
    installation lets Python find the native module beside the sources, which it meets first."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in [*DOCUMENTS, *SOURCES, ROOT / "deploy" / "Containerfile"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^\n#;]* '?ddtree-trt\b", text), path
        for extra in re.findall(r"pip install (?:--editable )?'\.\[(\w+)\]'|install_with\([\"'](\w+)[\"']\)", text):
            assert re.search(rf"^{''.join(extra)} = \[", project, re.MULTILINE), f"{path}: no extra {extra}"
        if path.is_relative_to(ROOT / "ddtree_trt") and path.name != "errors.py":
            assert not re.search(r"pip install (--editable )?'?\.", text), f"{path} spells the line by itself"
        if path.is_relative_to(ROOT / "docs"):
            assert not re.search(r"pip install '?\.", text), f"{path} installs a checkout that is not editable"
    assert install_with("serve").endswith("pip install --editable '.[serve]'")
    assert install_with().endswith("pip install --editable .")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (test_files_named_in_documents, "`ddtree_trt/no_such_file.py`"),
        (test_commands_and_options, "```\n$ ddtree-trt run engines/tiny --no-such-option\n```"),
        (test_commands_and_options, "`ddtree-trt fly`"),
        (test_make_targets, "`make coffee`"),
        (test_metrics_and_environment_names, "`ddtree_cups_of_coffee_total`"),
    ],
)
def test_what_is_not_there_is_found(check: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(text + "\n")
    with pytest.raises(AssertionError):
        check(document)
