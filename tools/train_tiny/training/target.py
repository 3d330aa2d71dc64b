"""Training of the target on the corpus, with a checkpoint and a count of right answers every few minutes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.checks import is_ended, is_right
from tools.train_tiny.export import save_target, target_config
from tools.train_tiny.generation import continue_batch
from tools.train_tiny.log import Log
from tools.train_tiny.model import Target, load_target
from tools.train_tiny.settings import PAD, TargetSettings
from tools.train_tiny.tokenizer import TokenSet, answer_text, load, prompt_ids

from .parallel import Rates, Shared, Worker, launch
from .transplant import transplanted

Batch = tuple[Tensor, Tensor]


def fresh(settings: TargetSettings) -> Target:
    """Random weights; what each layer adds to the residual stream starts at zero."""
    torch.manual_seed(settings.seed)
    model = Target(target_config(settings))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(p)
    return model


def batches(tokens: TokenSet, budget: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Whole conversations of like length without end: ids [N, S] padded on the right, answer mask [N, S]."""
    while True:
        order = np.argsort(tokens.lengths + rng.uniform(0, 8, len(tokens.lengths)), kind="stable")
        groups, begin = [], 0
        while begin < len(order):
            count = max(1, budget // (int(tokens.lengths[order[begin]]) + 8))
            groups.append(order[begin : begin + count])
            begin += count
        random.Random(int(rng.integers(1 << 30))).shuffle(groups)
        for group in groups:
            yield pack(tokens, group)


def pack(tokens: TokenSet, group: Any) -> Batch:
    width = int(tokens.lengths[group].max())
    ids, mask = np.full((len(group), width), PAD), np.zeros((len(group), width), bool)
    for row, index in enumerate(group):
        start, length = int(tokens.starts[index]), int(tokens.lengths[index])
        ids[row, :length] = tokens.ids[start : start + length]
        mask[row, :length] = tokens.is_answer[start : start + length]
    return torch.from_numpy(ids), torch.from_numpy(mask)


def answer_loss(model: Target, batch: Batch) -> Tensor:
    """Mean cross entropy of answer tokens; requests only condition."""
    ids, mask = batch
    chosen = mask[:, 1:]
    hidden, _ = model(ids[:, :-1])
    logits = model.head(hidden[chosen])
    return F.cross_entropy(logits.float(), ids[:, 1:][chosen])


@torch.no_grad()
def right_answers(model: Target, tokenizer_folder: Path, prompts_path: Path, max_new: int = 320) -> dict[str, Any]:
    """Per domain the right greedy answers of the held-out prompts, and how many ended by EOS."""
    tokenizer = load(tokenizer_folder)
    rows = [json.loads(line) for line in prompts_path.read_text().splitlines()]
    result: dict[str, Any] = {"right": {}, "ended": 0, "prompts": len(rows)}
    for domain in dict.fromkeys(row["domain"] for row in rows):
        chosen = [row for row in rows if row["domain"] == domain]
        prompts = [prompt_ids(tokenizer, row["prompt"]) for row in chosen]
        greedy = torch.zeros(len(chosen), dtype=torch.bool)
        answers = continue_batch(model, prompts, greedy, max_new, torch.Generator())
        right = [is_right(row, answer_text(tokenizer, ids)) for row, ids in zip(chosen, answers, strict=True)]
        result["right"][domain] = f"{sum(right)}/{len(right)}"
        result["ended"] += sum(map(is_ended, answers))
    return result


def _work(
    rank: int, shared: Shared, model: Target, settings: TargetSettings, files: dict[str, Path], done: dict[str, float]
) -> None:
    """One worker process."""
    torch.set_num_threads(1)
    tokens = TokenSet.load(files["train"])
    stream = batches(
        tokens, settings.tokens_per_micro, np.random.default_rng([settings.seed, rank, int(done["tokens"])])
    )
    rates = Rates(
        settings.adam_rate, settings.muon_rate, settings.weight_decay,
        settings.warmup_steps, settings.plateau, settings.seconds,
    )  # fmt: skip
    worker = Worker(shared, rank, model, rates, done["elapsed_s"])
    log = Log(files["log"]) if rank == 0 else None
    seen, due_line, due_check, stop = int(done["tokens"]), 0.0, worker.elapsed_s + settings.checkpoint_s, False
    while not stop:
        loss, stop = worker.step(settings.micro_batches, lambda model, _: answer_loss(model, next(stream)))
        seen += settings.micro_batches * settings.tokens_per_micro
        if log is None:
            continue
        log.average(loss)
        if worker.elapsed_s >= due_line:
            due_line = worker.elapsed_s + 20
            log.write(step=worker.steps, elapsed_s=round(worker.elapsed_s), tokens=seen)
        if worker.elapsed_s >= due_check and not stop:
            save_target(model, model.cfg, files["partial"])
            progress = {"elapsed_s": worker.elapsed_s, "tokens": seen}
            (files["partial"] / "progress.json").write_text(json.dumps(progress))
            log.write(elapsed_s=round(worker.elapsed_s), **right_answers(model, files["tokenizer"], files["prompts"]))
            due_check = worker.elapsed_s + settings.checkpoint_s
    if log is not None:
        save_target(model, model.cfg, files["out"])
        answers = right_answers(load_target(files["out"]), files["tokenizer"], files["prompts"])
        log.write(step=worker.steps, elapsed_s=round(worker.elapsed_s), tokens=seen, final=answers)


def train(settings: TargetSettings, workers: int, files: dict[str, Path], init: Path | None) -> None:
    """Train from nothing, from `init` (same shape, any tokenizer), or on from the last checkpoint.

    files: train, tokenizer, prompts (read); log, partial, out (written). A resumed run keeps its place in the
    schedule and loses only the optimizer's momenta.
    """
    model, done = fresh(settings), {"elapsed_s": 0.0, "tokens": 0}
    progress = files["partial"] / "progress.json"
    if progress.exists():
        model.load_state_dict(load_target(files["partial"]).state_dict())
        done = json.loads(progress.read_text())
    elif init is not None:
        model.load_state_dict(transplanted(init, files["tokenizer"]).state_dict())
    launch(_work, workers, model, settings, files, done)
