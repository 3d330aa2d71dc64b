"""Seeded corpus: training conversations, held-out conversations and the 60 held-out prompts."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .settings import CorpusSettings
from .tasks import chat_tasks, chat_writing, code_tasks, math_tasks
from .tasks.writer import Family, Task, write_task

DOMAINS: dict[str, list[Family]] = {
    "math": math_tasks.FAMILIES,
    "code": code_tasks.FAMILIES,
    "chat": chat_tasks.FAMILIES + chat_writing.FAMILIES,
}
SHARES = ("math", "chat", "code", "chat", "math")
"""Domains of training conversations in turn: code is learnt soonest, chat, with the most families, last."""


def prompt_row(task: Task) -> dict[str, Any]:
    """One line of prompts.jsonl."""
    ((request, answer),) = task.turns
    return {"domain": task.domain, "family": task.family, "prompt": request, "reference": answer, **task.check}


def held_out(rng: random.Random, domain: str, count: int, longest_of: int = 1) -> list[Task]:
    """Different held-out tasks of one turn, the families in turn so that each is seen; each has the longest answer of
    so many drawn."""
    families = list(dict.fromkeys(DOMAINS[domain]))
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        family = families[len(tasks) % len(families)]
        drawn = [write_task(rng, domain, [family], held_out=True) for _ in range(longest_of)]
        task = max(drawn, key=lambda task: len(task.turns[0][1]))
        tasks.setdefault(task.turns[0][0], task)
    return list(tasks.values())


def training(settings: CorpusSettings, avoid: set[str]) -> Iterator[Task]:
    """Conversations that repeat neither each other nor a held-out request."""
    rng, seen = random.Random(settings.seed), set(avoid)
    for index in range(settings.conversations):
        domain = SHARES[index % len(SHARES)]
        task = write_task(rng, domain, DOMAINS[domain], held_out=False)
        if task.turns[0][0] not in seen:
            seen.add(task.turns[0][0])
            yield task


def build(settings: CorpusSettings, prompts_path: Path, corpus_path: Path) -> dict[str, int]:
    """Write prompts.jsonl and the corpus, a line of [domain, turns] per conversation after the held-out ones."""
    rng = random.Random(settings.seed + 1)
    prompts = [
        prompt_row(task)
        for domain in DOMAINS
        for task in held_out(rng, domain, settings.prompts_per_domain, settings.longest_of)
    ]
    prompts_path.parent.mkdir(parents=True, exist_ok=True)
    prompts_path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    check = [task for domain in DOMAINS for task in held_out(rng, domain, settings.held_out_per_domain)]
    avoid = {row["prompt"] for row in prompts} | {task.turns[0][0] for task in check}
    counts = {domain: 0 for domain in DOMAINS}
    corpus_path.parent.mkdir(parents=True, exist_ok=True)
    with corpus_path.open("w") as file:
        for task in check:
            file.write(json.dumps(["hold", task.domain, task.turns]) + "\n")
        for task in training(settings, avoid):
            counts[task.domain] += 1
            file.write(json.dumps(["train", task.domain, task.turns]) + "\n")
    return counts
