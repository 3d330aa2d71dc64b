"""Right answers and tokens per round on the held-out prompts, by engines of what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.build.compile import BuildRequest, compile_engine

from .checks import is_ended, is_right
from .settings import EvaluationSettings


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
            report["ended"] = sum(is_ended(a.token_ids) for a in answers)
            report["mean_answer_tokens"] = round(sum(len(a.token_ids) for a in answers) / len(answers), 1)
    return report
