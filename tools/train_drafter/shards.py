"""Shards of training data: one file per batch of answers, written whole or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .generation import Record, answer_batch
from .prompts import is_usable, training_prompts
from .settings import DataSettings
from .target import Target


class Shard:
    """Sequences end to end; taps stay on disk.

    ids, top_ids, top_logits by token; starts, lengths, prompts, temperatures by sequence.
    """

    def __init__(self, path: Path) -> None:
        self.file: Any = safe_open(path, framework="pt").__enter__()
        get = self.file.get_tensor
        self.ids, self.top_ids, self.top_logits = (get(name) for name in ("ids", "top_ids", "top_logits"))
        self.lengths, self.prompts, self.temperatures = (get(name) for name in ("lengths", "prompts", "temperatures"))
        self.starts: Tensor = self.lengths.cumsum(0) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def record(self, index: int) -> Record:
        start, length = int(self.starts[index]), int(self.lengths[index])
        rows = slice(start, start + length)
        return Record(
            self.ids[rows].tolist(), int(self.prompts[index]), float(self.temperatures[index]),
            self.file.get_slice("taps")[rows], self.top_ids[rows], self.top_logits[rows],
        )  # fmt: skip

    def records(self) -> list[Record]:
        return [self.record(index) for index in range(len(self))]


def write_shard(records: Sequence[Record], path: Path) -> None:
    tensors = {
        "ids": torch.tensor([token for r in records for token in r.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(r.ids) for r in records]),
        "prompts": torch.tensor([r.prompt for r in records]),
        "temperatures": torch.tensor([r.temperature for r in records]),
        "taps": torch.cat([r.taps for r in records]),
        "top_ids": torch.cat([r.top_ids for r in records]),
        "top_logits": torch.cat([r.top_logits for r in records]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def self_written(target: Target, count: int, settings: DataSettings, generator: torch.Generator) -> list[str]:
    """Requests as the target imagines its user to write them, of no held-out kind; about `count`, seldom all usable."""
    opening, hot = target.opening_ids(), torch.ones(count)
    records = answer_batch(target, [opening] * count, hot, settings.self_tokens, settings.top_k, 1, generator)
    ended = [r.ids[r.prompt : -1] for r in records if r.ids[-1] in target.stops]
    texts = (target.tokenizer.decode(ids, skip_special_tokens=False).strip() for ids in ended)
    return [text for text in texts if is_usable(text)]


def pool_prompts(target: Target, pool: int, settings: DataSettings) -> Iterator[list[tuple[str, list[int]]]]:
    """The batches of one pool, prompts of like length together: (text, ids) each."""
    total = settings.batch * settings.pool
    generator = torch.Generator(target.embedding.device).manual_seed(1_000_003 * settings.seed + pool)
    texts = self_written(target, round(total * settings.self_written), settings, generator)
    texts += [text for _, text in training_prompts(settings.seed, pool, total - len(texts))]
    rows = [(text, target.prompt_ids(text)) for text in texts]
    rows = sorted((row for row in rows if len(row[1]) <= settings.max_prompt), key=lambda row: len(row[1]))
    for part in range(settings.pool):
        yield rows[part * len(rows) // settings.pool : (part + 1) * len(rows) // settings.pool]


def write_shards(
    target: Target, folder: Path, pools: range, settings: DataSettings, report: Callable[..., None]
) -> None:
    """Write the shards of the given pools that are not there yet."""
    for pool in pools:
        paths = [folder / f"shard-{pool:05d}-{part}.safetensors" for part in range(settings.pool)]
        if all(path.exists() for path in paths):
            continue
        for part, (path, rows) in enumerate(zip(paths, pool_prompts(target, pool, settings), strict=True)):
            if path.exists():
                continue
            rng = random.Random(f"temperatures {settings.seed} {pool} {part}")
            values, shares = zip(*settings.temperatures, strict=True)
            temperatures = torch.tensor(rng.choices(values, shares, k=len(rows)))
            generator = torch.Generator(target.embedding.device).manual_seed(rng.getrandbits(40))
            records = answer_batch(
                target,
                [ids for _, ids in rows],
                temperatures,
                settings.max_new,
                settings.top_k,
                settings.kept,
                generator,
            )
            write_shard(records, path)
            answered = sum(len(r.ids) - r.prompt for r in records)
            example = rows[len(rows) // 2][0][:80]
            report(shard=path.stem, sequences=len(records), answer_tokens=answered, example=example)


def write_greedy(target: Target, prompts: Sequence[str], max_new: int, path: Path, kept: int) -> None:
    """One shard of greedy answers to `prompts`, for measuring; left alone where it exists."""
    if path.exists():
        return
    ids = [target.prompt_ids(prompt) for prompt in prompts]
    generator = torch.Generator(target.embedding.device).manual_seed(0)
    write_shard(answer_batch(target, ids, torch.zeros(len(ids)), max_new, kept, kept, generator, whole=True), path)
