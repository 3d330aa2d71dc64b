"""Whoever copies an example from the documents sees the tiny pair answer, not stammer one token a round."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.triton.export import export_triton

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
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
    found = {page: prompts_in((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
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
