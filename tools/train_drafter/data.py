"""The target's answers, as token ids: a file per pool, written whole or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .prompts import is_usable, training_prompts
from .settings import DataSettings
from .target import Answer, Target

Prompts = Callable[[int], list[list[int]]]
"""The prompts of a pool by its number, as ids."""


def write(answers: Sequence[Answer], path: Path) -> None:
    tensors = {
        "ids": torch.tensor([token for a in answers for token in a.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(a.ids) for a in answers]),
        "prompts": torch.tensor([a.prompt for a in answers]),
        "temperatures": torch.tensor([a.temperature for a in answers]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def read(path: Path) -> list[Answer]:
    tensors = load_file(path)
    rows = tensors["ids"].split(tensors["lengths"].tolist())
    prompts, temperatures = tensors["prompts"].tolist(), tensors["temperatures"].tolist()
    return [Answer(ids.tolist(), p, t) for ids, p, t in zip(rows, prompts, temperatures, strict=True)]


class Answers:
    """All answers of a folder that may still be growing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Path, list[Answer]] = {}
        self.rows: list[Answer] = []

    def scan(self) -> None:
        for path in sorted(self.folder.glob("pool-*.safetensors")):
            if path not in self.files:
                self.files[path] = [a for a in read(path) if len(a.ids) - a.prompt > 1]
        self.rows = [answer for _, rows in sorted(self.files.items()) for answer in rows]
        if not self.rows:
            raise SystemExit(f"{self.folder} has no answers yet: run the stage data first")

    def draw(self, count: int, generator: torch.Generator) -> list[Answer]:
        """Answers of like length, so that little of a pass is padding."""
        drawn = [self.rows[i] for i in torch.randint(len(self.rows), (8 * count,), generator=generator).tolist()]
        drawn.sort(key=lambda a: len(a.ids))
        first = int(torch.randint(7 * count + 1, (1,), generator=generator))
        return drawn[first : first + count]


def chat_prompts(target: Target, settings: DataSettings) -> Prompts:
    """Requests as the target imagines its user to write them, of no held-out kind, and composed ones."""

    def prompts(pool: int) -> list[list[int]]:
        total = settings.batch * settings.pool
        count = round(total * settings.self_written)
        hot = torch.ones(count)
        opening = [target.opening_ids()] * count
        found = target.answers(opening, hot, settings.self_tokens, settings.top_k, whole=False)
        ended = [a.ids[a.prompt : -1] for a in found if a.ids[-1] in target.stops]
        texts = [target.tokenizer.decode(ids, skip_special_tokens=False).strip() for ids in ended]
        texts = [text for text in texts if is_usable(text)]
        texts += [text for _, text in training_prompts(settings.seed, pool, total - len(texts))]
        return [target.prompt_ids(text) for text in texts]

    return prompts


def write_pools(
    target: Target, folder: Path, pools: range, settings: DataSettings, prompts: Prompts, report: Callable[..., None]
) -> None:
    """Write the files of the given pools that are not there yet."""
    for pool in pools:
        path = folder / f"pool-{pool:05d}.safetensors"
        if path.exists():
            continue
        torch.manual_seed(1_000_003 * settings.seed + pool)
        rows = sorted((ids for ids in prompts(pool) if len(ids) <= settings.max_prompt), key=len)
        values, shares = zip(*settings.temperatures, strict=True)
        answers = []
        for begin in range(0, len(rows), settings.batch):
            part = rows[begin : begin + settings.batch]
            rng = random.Random(f"temperatures {settings.seed} {pool} {begin}")
            heat = torch.tensor(rng.choices(values, shares, k=len(part)))
            answers += target.answers(part, heat, settings.max_new, settings.top_k, whole=False)
        write(answers, path)
        report(pool=pool, answers=len(answers), answer_tokens=sum(len(a.ids) - a.prompt for a in answers))


def write_greedy(target: Target, prompts: Sequence[list[int]], max_new: int, path: Path) -> None:
    """A file of whole greedy answers, for measuring; left alone where it exists."""
    if not path.exists():
        write(target.answers(prompts, torch.zeros(len(prompts)), max_new, 1, whole=True), path)
