"""Right answers and tokens per round on the held-out prompts."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .checks import is_ended, is_right
from .decoding import Decoder, MakeTree
from .model import load_drafter, load_target
from .settings import EvaluationSettings
from .tokenizer import answer_text, load, prompt_ids
from .trees import best_first, chain


@dataclass
class Tally:
    """Rounds, tokens and seconds of one mode in one domain."""

    rounds: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    equal_to_ar: int = 0
    answers: int = 0

    def add(self, answer: list[int], rounds: list[int], seconds: float, reference: list[int]) -> None:
        self.rounds += rounds
        self.tokens += len(answer)
        self.seconds += seconds
        self.equal_to_ar += answer == reference
        self.answers += 1

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rounds + other.rounds, self.tokens + other.tokens, self.seconds + other.seconds,
            self.equal_to_ar + other.equal_to_ar, self.answers + other.answers,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_per_round": round(sum(self.rounds) / max(1, len(self.rounds)), 3),
            "rounds": len(self.rounds),
            "ms_per_token": round(1000 * self.seconds / max(1, self.tokens), 3),
            "equal_to_ar": f"{self.equal_to_ar}/{self.answers}",
        }


def modes(settings: EvaluationSettings) -> dict[str, MakeTree | None]:
    trees = {f"ddtree-{budget}": functools.partial(best_first, budget=budget) for budget in settings.budgets}
    return {"ar": None, "dflash": chain, **trees}


def evaluate(
    folder: Path, settings: EvaluationSettings, block: int | None = None, prompts: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(report, answers) of the pair in `folder` (target, drafter, tokenizer, prompts.jsonl)."""
    torch.set_num_threads(1)
    decoder = Decoder(load_target(folder / "target"), load_drafter(folder / "drafter"), block)
    tokenizer = load(folder / "tokenizer")
    rows = [json.loads(line) for line in (prompts or folder / "prompts.jsonl").read_text().splitlines()]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    tallies = {(mode, domain): Tally() for mode in modes(settings) for domain in domains}
    answers: list[dict[str, Any]] = []
    for seed in range(settings.seeds):
        for number, row in enumerate(rows):
            prompt, reference = prompt_ids(tokenizer, row["prompt"]), []
            for mode, make_tree in modes(settings).items():
                began = time.perf_counter()
                answer, rounds = decoder.generate(
                    prompt, make_tree, settings.max_new_tokens, settings.temperature, 1000 * seed + number
                )
                elapsed = time.perf_counter() - began
                if make_tree is None:
                    reference, text = answer, answer_text(tokenizer, answer)
                    verdict = {"right": is_right(row, text), "ended": is_ended(answer), "tokens": len(answer)}
                    answers.append({**row, "answer": text, **verdict})
                tallies[mode, row["domain"]].add(answer, rounds, elapsed, reference)
    count = {domain: [a for a in answers if a["domain"] == domain] for domain in domains}
    report: dict[str, Any] = {
        "temperature": settings.temperature,
        "block": decoder.block,
        "prompts": len(rows),
        "right": {d: f"{sum(a['right'] for a in found)}/{len(found)}" for d, found in count.items()},
        "ended": f"{sum(a['ended'] for a in answers)}/{len(answers)}",
        "mean_answer_tokens": {d: round(sum(a["tokens"] for a in found) / len(found), 1) for d, found in count.items()},
        "modes": {},
    }
    for mode in modes(settings):
        by_domain = {domain: tallies[mode, domain] for domain in domains}
        by_domain["all"] = sum(by_domain.values(), Tally())
        report["modes"][mode] = {domain: tally.summary() for domain, tally in by_domain.items()}
    return report, answers


def markdown(report: dict[str, Any]) -> str:
    """The report as a table of tokens per round."""
    domains = [*report["right"], "all"]
    right = [report["right"].get(d, "") for d in domains]
    lines = [
        f"Temperature {report['temperature']:g}, block {report['block']}, {report['prompts']} prompts, "
        f"ended by EOS {report['ended']}.",
        "",
        "| | " + " | ".join(domains) + " | ms per token | equal to AR |",
        "|" + "---|" * (len(domains) + 3),
        "| right answers | " + " | ".join(right) + " | | |",
        "| tokens per answer | " + " | ".join(str(report["mean_answer_tokens"].get(d, "")) for d in domains) + " | | |",
    ]
    for mode, row in report["modes"].items():
        cells = [f"{row[d]['tokens_per_round']:.2f}" for d in domains]
        cells += [f"{row['all']['ms_per_token']:.2f}", row["all"]["equal_to_ar"]]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
