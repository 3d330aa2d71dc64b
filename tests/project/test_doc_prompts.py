"""Whoever copies an example from the documents sees the tiny pair answer, not stammer one token a round."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.triton.export import export_triton

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "cpp_plugins" / "README.md"]
LEAST_PER_ROUND = 3.0
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def in_shell(block: str) -> Iterator[Any]:
    """Prompts of `run` commands, but for other engines than the tiny pair's, and of the JSON that curl sends. An
    ellipsis is nobody's prompt, and what a hint answers is a bad one on purpose."""
    for line in () if "\nhint: " in block else block.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ").strip()
        if line.startswith("curl "):
            for body in (json.loads(word) for word in shlex.split(line) if word.startswith("{")):
                yield from (body[key] for key in ("messages", "text_input", "prompt") if key in body)
        elif re.search(r"ddtree-trt run (?!engines/(?!tiny\b))", line):
            for option in re.finditer(r"(?:--prompt|-p)[ =](\"[^\"]*\"|'[^']*'|\S+)", line):
                if (text := option[1].strip("\"'")) != "…" and "$" not in text:
                    yield [{"role": "user", "content": text}]


# Calls that take a prompt first, and the place of the prompt in a helper of an example.
TAKERS = {"generate": 0, "stream": 0, "complete": 0, "submit": 0, "tensor": 1}


def in_python(block: str) -> Iterator[Any]:
    """Prompts of calls of ours and of clients, where they are written out or assigned to a name before."""
    nodes = list(ast.walk(ast.parse(block)))
    known: dict[str, Any] = {}
    for node in nodes:  # breadth first, which is the order of the lines of one level
        if isinstance(node, ast.Assign):
            with suppress(Exception):  # what is made by a call is no prompt
                known[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), {}, known)
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [k.value for k in node.keywords if k.arg in ("messages", "prompt")]
            if name in TAKERS and (name != "tensor" or ast.unparse(node.args[0]) == "'text_input'"):
                given += node.args[TAKERS[name] :][:1]
            for each in given:
                found = eval(ast.unparse(each), {}, known)
                several = isinstance(found, list) and not isinstance(found[0], dict)
                yield from found if several else [found]


def in_document(path: Path) -> list[Any]:
    found: list[Any] = []
    for language, block in FENCED.findall(path.read_text(encoding="utf-8")):
        found += in_python(block) if language == "python" else in_shell(block)
    return found


def assert_answered(llm: LLM, prompt: Any) -> None:
    asked = prompt.decode() if isinstance(prompt, bytes) else prompt
    output = llm.generate([asked], SamplingParams(max_tokens=512, tree_budget=32))[0]
    said = output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop", f"{prompt!r} has no end: {said!r}"
    assert output.metrics.mean_acceptance_length >= LEAST_PER_ROUND, f"{prompt!r} is answered slowly: {said!r}"


def test_prompts_of_documents(llm: LLM, tiny_engine: Path, tmp_path: Path) -> None:
    """By their numbers too, so that a document whose examples are no longer understood does not pass by having none."""
    exported = {f"exported-{it}": export_triton(tiny_engine, tmp_path, it, layout=it) for it in ("trtllm", "vllm")}
    pages = {path.relative_to(ROOT).as_posix().removeprefix("docs/"): path for path in DOCUMENTS}
    pages |= {name: path / "README.md" for name, path in exported.items()}
    prompts = {name: found for name, path in pages.items() if (found := in_document(path))}
    prompts["Containerfile"] = list(in_shell((ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t", "")
    prompts["Makefile"] = [[{"role": "user", "content": re.findall(r"^PROMPT \?= (.*)$", makefile, re.MULTILINE)[0]}]]
    assert {name: len(found) for name, found in prompts.items()} == {
        **{"README.md": 3, "coming-from-vllm.md": 1, "deployment.md": 4, "generation.md": 4, "gpu.md": 1},
        **{"serving.md": 6, "tutorial.md": 4, "exported-trtllm": 2, "exported-vllm": 2},
        **{"Containerfile": 1, "Makefile": 1},
    }
    for each in {str(prompt): prompt for found in prompts.values() for prompt in found}.values():
        assert_answered(llm, each)
