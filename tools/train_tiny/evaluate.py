"""Right answers and tokens per round on the held-out prompts, by engines of what was trained."""

import json
import re
from pathlib import Path
from typing import Any

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.build.compile import BuildRequest, compile_engine

from .settings import EOS, EvaluationSettings


def passes_tests(source: str, name: str, tests: list[list[Any]]) -> bool:
    """Run an answer of the tiny target, which can only write small pure functions, against its tests."""
    scope: dict[str, Any] = {}
    try:
        exec(compile(source, "answer", "exec"), scope)
        return all(repr(scope[name](*arguments)) == expected for arguments, expected in tests)
    except Exception:
        return False


def is_right(row: dict[str, Any], text: str) -> bool:
    """Judge `text` by a line of prompts.jsonl.

    math: the last line is the expected number. code: all tests pass. chat: an expected value that starts with "=" is
    the whole answer; otherwise it occurs, all of "facts" occur in order, and all of "also" occur.
    """
    if row["domain"] == "math":
        return text.strip().split("\n")[-1] == f"Answer: {row['expected']}"
    if row["domain"] == "code":
        return passes_tests(text, row["name"], row["tests"])
    expected: str = row["expected"]
    if expected.startswith("="):
        return text.strip() == expected[1:].strip()
    padded, facts = f" {text}", ".*?".join(map(re.escape, row.get("facts", [expected])))
    in_order = re.search(facts, padded, re.DOTALL) is not None
    return expected in padded and in_order and all(fact in padded for fact in row.get("also", []))


def evaluate(folder: Path, drafter: str, engine: Path, settings: EvaluationSettings) -> dict[str, Any]:
    """Build an engine of the target in `folder` and one of its drafters, and measure it at each temperature."""
    request = BuildRequest(
        target="tiny", checkpoint=folder / "target", drafter=folder / drafter, output=engine, force=True
    )
    compile_engine(request)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    with LLM(engine) as llm:
        return {str(heat): _measure(llm, rows, heat, settings) for heat in settings.temperatures}


def _measure(llm: LLM, rows: list[dict[str, Any]], temperature: float, settings: EvaluationSettings) -> dict[str, Any]:
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    modes = {"ar": ("ar", 0)}
    if llm.engine.manifest.drafter_kind == "dflash":
        modes["dflash"] = ("dflash", max(settings.budgets))
    tree = "ddtree" if "dflash" in modes else "eagle"
    modes |= {f"{tree}-{budget}": (tree, budget) for budget in settings.budgets}
    report: dict[str, Any] = {"prompts": len(rows), "tokens_per_round": {}}
    for mode, (method, budget) in modes.items():
        params = SamplingParams(
            method=method, tree_budget=budget, temperature=temperature, seed=0, max_tokens=settings.max_new_tokens
        )
        outputs = llm.generate(prompts, params)
        metrics = [output.metrics for output in outputs]
        report["tokens_per_round"][mode] = round(
            sum(sum(each.acceptance_lengths) for each in metrics) / sum(each.rounds for each in metrics), 3
        )
        if mode == "ar":
            answers = [output.outputs[0] for output in outputs]
            report["right"] = sum(is_right(row, a.text) for row, a in zip(rows, answers, strict=True))
            report["ended"] = sum(a.token_ids[-1:] == [EOS] for a in answers)
            report["mean_answer_tokens"] = round(sum(len(a.token_ids) for a in answers) / len(answers), 1)
    return report
