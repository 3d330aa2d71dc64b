"""The target's answers, as token ids: a file per pool, written whole or not at all."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .prompts import is_usable, training_prompts
from .settings import DataSettings
from .target import Answer, Target

Prompts = Callable[[int], list[list[list[int]]]]
"""The conversations of a pool by its number: what stands before each of the answers, as ids."""


def write(answers: Sequence[Answer], path: Path) -> None:
    tensors = {
        "ids": torch.tensor([token for a in answers for token in a.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(a.ids) for a in answers]),
        "spans": torch.tensor([span for a in answers for span in a.spans]),
        "turns": torch.tensor([len(a.spans) for a in answers]),
        "temperatures": torch.tensor([a.temperature for a in answers]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def read(path: Path) -> list[Answer]:
    tensors = load_file(path)
    rows, spans = (tensors[name].split(tensors[by].tolist()) for name, by in (("ids", "lengths"), ("spans", "turns")))
    return [
        Answer(ids.tolist(), tuple((begin, end) for begin, end in turns.tolist()), temperature)
        for ids, turns, temperature in zip(rows, spans, tensors["temperatures"].tolist(), strict=True)
    ]


class Answers:
    """All answers of a folder that may still be growing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Path, list[Answer]] = {}
        self.rows: list[Answer] = []

    def scan(self) -> None:
        for path in sorted(self.folder.glob("pool-*.safetensors")):
            if path not in self.files:
                self.files[path] = [a for a in read(path) if max(map(len, a.told)) > 1]
        self.rows = [answer for _, rows in sorted(self.files.items()) for answer in rows]
        if not self.rows:
            raise SystemExit(f"{self.folder} has no answers yet: run the stage data first")

    def draw(self, count: int, tokens: int, generator: torch.Generator) -> list[Answer]:
        """Conversations of like length, so that little of a pass is padding: `count`, or fewer that have no more than
        `tokens` with their padding, but one at least."""
        drawn = [self.rows[i] for i in torch.randint(len(self.rows), (8 * count,), generator=generator).tolist()]
        drawn.sort(key=lambda a: len(a.ids))
        first = int(torch.randint(7 * count + 1, (1,), generator=generator))
        rows = drawn[first : first + count]
        return rows[: max(1, tokens // len(rows[-1].ids))]


def chat_ids(target: Target, prompts: Sequence[str]) -> list[list[int]]:
    """A user's messages in the chat template, each from the end of the answer before it."""
    return [target.next_ids(text) if turn else target.prompt_ids(text) for turn, text in enumerate(prompts)]


def chat_prompts(target: Target, settings: DataSettings) -> Prompts:
    """Requests that the target imagines of its user, of no held-out kind, and composed ones; some in one chat."""

    def prompts(pool: int) -> list[list[list[int]]]:
        total = settings.batch * settings.pool
        count = round(total * settings.self_written)
        hot = torch.ones(count)
        opening = [target.opening_ids()] * count
        found = target.answers(opening, hot, settings.self_tokens, settings.top_k, whole=False)
        ended = [a.told[0][:-1] for a in found if a.ids[-1] in target.stops]
        texts = [target.tokenizer.decode(ids, skip_special_tokens=False).strip() for ids in ended]
        texts = [text for text in texts if is_usable(text)]
        texts += [text for _, text in training_prompts(settings.seed, pool, total - len(texts))]
        rng, chats = random.Random(f"chats {settings.seed} {pool}"), list[list[str]]()
        rng.shuffle(texts)
        while texts:
            turns = rng.randint(2, settings.most_turns) if rng.random() < settings.chats else 1
            chats.append(texts[:turns])
            texts = texts[turns:]
        return [chat_ids(target, chat) for chat in chats]

    return prompts


def converse(
    target: Target,
    chats: Sequence[list[list[int]]],
    temperatures: Sequence[float],
    settings: DataSettings,
    *,
    whole: bool = False,
) -> list[Answer]:
    """Answers to the messages of each conversation, one turn of all at a time.

    One ends where it would become longer than `max_prompt`, or unless the answers are to be `whole` behind one that was
    cut at `max_new`; without an answer it is left out.
    """
    told = [Answer([], (), temperature) for temperature in temperatures]
    for turn in range(max(map(len, chats), default=0)):
        asked = dict[int, list[int]]()
        for i, (before, chat) in enumerate(zip(told, chats, strict=True)):
            ended = bool(before.ids) and before.ids[-1] in target.stops
            if turn < len(chat) and len(before.spans) == turn and (ended or whole or turn == 0):
                ids = before.ids + chat[turn][int(ended and before.ids[-1] == chat[turn][0]) :]
                if len(ids) <= settings.max_prompt:
                    asked[i] = ids
        order = sorted(asked, key=lambda i: len(asked[i]))
        for begin in range(0, len(order), settings.batch):
            part = order[begin : begin + settings.batch]
            heat = torch.tensor([told[i].temperature for i in part])
            found = target.answers([asked[i] for i in part], heat, settings.max_new, settings.top_k, whole=whole)
            for i, new in zip(part, found, strict=True):
                told[i] = replace(new, spans=told[i].spans + new.spans)
    return [answer for answer in told if answer.spans]


def write_pools(
    target: Target,
    folder: Path,
    pools: Iterable[int],
    settings: DataSettings,
    prompts: Prompts,
    report: Callable[..., None],
) -> None:
    """Write the files of the given pools that are not there yet."""
    for pool in pools:
        path = folder / f"pool-{pool:05d}.safetensors"
        if path.exists():
            continue
        torch.manual_seed(1_000_003 * settings.seed + pool)
        chats = prompts(pool)
        values, shares = zip(*settings.temperatures, strict=True)
        heat = random.Random(f"temperatures {settings.seed} {pool}").choices(values, shares, k=len(chats))
        answers = converse(target, chats, heat, settings)
        write(answers, path)
        told = [ids for a in answers for ids in a.told]
        report(pool=pool, answers=len(told), answer_tokens=sum(map(len, told)))


def write_greedy(target: Target, chats: Sequence[list[list[int]]], settings: DataSettings, path: Path) -> None:
    """A file of whole greedy answers, for measuring; left alone where it exists."""
    if not path.exists():
        write(converse(target, chats, [0.0] * len(chats), settings, whole=True), path)
