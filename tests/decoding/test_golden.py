"""Acceptance lengths on the packaged pair against those of the published DDTree code, round by round.

`workbench/golden.py` writes the file and says how its rounds are counted.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import ddtree_trt
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ddtree_reference.json").read_text(encoding="utf-8"))
PAIR = Path(ddtree_trt.__file__).parent / "assets" / "tiny"


def lengths_within(trace: dict[str, Any]) -> list[int]:
    """The trace's acceptance lengths without the tokens past the end, nor a round of nothing else."""
    *rounds, last = trace["acceptance_lengths"]
    last -= trace["surplus"]
    return [*rounds, last] if last else rounds


@pytest.mark.parametrize(
    ("method", "budget"), sorted({(t["method"], t["budget"]) for t in GOLDEN["traces"]}), ids=lambda v: str(v)
)
def test_every_round(llm: LLM, method: str, budget: int) -> None:
    found = {name: hashlib.sha256((PAIR / name).read_bytes()).hexdigest() for name in GOLDEN["sha256"]}
    assert found == GOLDEN["sha256"], f"traces of another pair; make them anew with {GOLDEN['regenerate']}"
    traces = [t for t in GOLDEN["traces"] if (t["method"], t["budget"], t["stable"]) == (method, budget, True)]
    params = SamplingParams(method=method, tree_budget=budget, max_tokens=GOLDEN["settings"]["max_new_tokens"])
    outputs = llm.generate([GOLDEN["prompts"][t["prompt"]]["prompt_ids"] for t in traces], params)
    for trace, output in zip(traces, outputs, strict=True):
        prompt = GOLDEN["prompts"][trace["prompt"]]["prompt"]
        assert list(output.outputs[0].token_ids) == trace["output_ids"], prompt
        assert list(output.metrics.acceptance_lengths) == lengths_within(trace), prompt
