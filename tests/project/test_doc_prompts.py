"""Whoever copies an example from the documents sees the tiny pair answer, not stammer one token a round."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.triton.export import export_triton

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "cpp_plugins" / "README.md"]
LEAST_PER_ROUND = 3.0
Prompt = str | tuple[tuple[str, str], ...]  # a text, or a chat as (role, content) pairs
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def chat(messages: list[dict[str, str]]) -> Prompt:
    return tuple((m["role"], m["content"]) for m in messages)


def in_shell(block: str) -> Iterator[Prompt]:
    """Prompts of `run` commands, but for other engines than the tiny pair's, and of the JSON that curl sends. An
    ellipsis is nobody's prompt, and what a hint answers is a bad one on purpose."""
    if "\nhint: " in block:
        return
    joined = block.replace("\\\n", " ")
    for line in joined.splitlines():
        line = line.removeprefix("$ ").strip()
        if line.startswith("curl "):
            for body in (json.loads(w) for w in shlex.split(line) if w.startswith("{")):
                for key in ("messages", "text_input", "prompt"):
                    if key in body:
                        yield chat(body[key]) if key == "messages" else body[key]
        elif re.search(r"ddtree-trt run (?!engines/(?!tiny\b))", line):
            for option in re.finditer(r"(?:--prompt|-p)[ =](\"[^\"]*\"|'[^']*'|\S+)", line):
                if (text := option[1].strip("\"'")) != "…" and "$" not in text:
                    yield (("user", text),)


# Calls that take a prompt first, and the place of the prompt in a helper of an example.
TAKERS = {"generate": 0, "stream": 0, "complete": 0, "submit": 0, "tensor": 1}


def in_python(block: str) -> Iterator[Prompt]:
    """Prompts of calls of ours and of clients, where they are written out or assigned to a name before."""
    tree = ast.parse(block)
    known: dict[str, Any] = {}

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "example", "eval"), {}, known)

    for node in ast.walk(tree):  # breadth first, which is the order of the lines of one level
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                known[node.targets[0].id] = value(node.value)
            except Exception:  # what is made by a call is no prompt
                continue
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        found = [value(k.value) for k in node.keywords if k.arg in ("messages", "prompt")]
        if name == "tensor" and ast.unparse(node.args[0]) != "'text_input'":
            continue
        if name in TAKERS and len(node.args) > TAKERS[name]:
            found.append(value(node.args[TAKERS[name]]))
        for one in found:
            yield from prompts_of(one)


def prompts_of(given: Any) -> Iterator[Prompt]:
    if isinstance(given, bytes):
        yield given.decode()
    elif isinstance(given, str):
        yield given
    elif given and isinstance(given[0], dict):
        yield chat(given)
    else:
        for one in given:
            yield from prompts_of(one)


def in_document(path: Path) -> list[Prompt]:
    found: list[Prompt] = []
    for language, block in FENCED.findall(path.read_text(encoding="utf-8")):
        found += in_python(block) if language == "python" else in_shell(block)
    return found


def in_container_file() -> list[Prompt]:
    return list(in_shell((ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")))


def of_make_demo() -> Prompt:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t", "")
    return (("user", re.findall(r"^PROMPT \?= (.*)$", text, re.MULTILINE)[0]),)


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


def assert_answered(llm: LLM, prompt: Prompt) -> None:
    asked = prompt if isinstance(prompt, str) else [{"role": r, "content": c} for r, c in prompt]
    output = llm.generate([asked], SamplingParams(max_tokens=512, tree_budget=32))[0]
    said = output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop", f"{prompt!r} has no end: {said!r}"
    assert output.metrics.mean_acceptance_length >= LEAST_PER_ROUND, f"{prompt!r} is answered slowly: {said!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_prompts_of_documents(llm: LLM, path: Path) -> None:
    for prompt in in_document(path):
        assert_answered(llm, prompt)


def test_where_prompts_are() -> None:
    """So that a document whose examples are no longer understood does not pass by having none."""
    counts = {path.name: len(in_document(path)) for path in DOCUMENTS if path.parent != ROOT / "cpp_plugins"}
    expected = {
        "README.md": 3,
        "coming-from-vllm.md": 1,
        "deployment.md": 4,
        "generation.md": 4,
        "gpu.md": 1,
        "serving.md": 6,
        "tutorial.md": 4,
    }
    assert {name: n for name, n in counts.items() if n} == expected


def test_other_prompts(llm: LLM, tiny_engine: Path, tmp_path: Path) -> None:
    (in_container,) = in_container_file()
    exported = [
        prompt
        for layout in ("trtllm", "vllm")
        for prompt in in_document(export_triton(tiny_engine, tmp_path, layout, layout=layout) / "README.md")
    ]
    assert len(exported) == 4
    for prompt in (in_container, of_make_demo(), *exported):
        assert_answered(llm, prompt)


def test_a_bad_prompt_is_found(llm: LLM) -> None:
    block = 'outputs = llm.generate(["def fib(n):"], SamplingParams(max_tokens=64))\n'
    (bad,) = in_python(block)
    with pytest.raises(AssertionError, match="has no end"):
        assert_answered(llm, bad)
    (asked,) = in_shell("""curl http://x -d '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'\n""")
    with pytest.raises(AssertionError, match="has no end"):
        assert_answered(llm, asked)
