"""The training loop: two workers or one, on shards that may still be growing, resumable at any step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train_tiny.log import Log
from tools.train_tiny.model import Drafter
from tools.train_tiny.training.parallel import Rates, Shared, Worker, launch

from .blocks import block_loss, draft_states, drop_channels, make_blocks, random_anchors
from .drafter import averaged, export
from .generation import Record
from .settings import DrafterSettings, Settings
from .shards import Shard, shard_paths
from .validation import tokens_per_round

RESCAN_STEPS = 20
"""How often a worker looks for new shards."""


@dataclass(frozen=True)
class Tables:
    """The frozen target's embedding and head [V, H] in bf16, all that training needs of it."""

    embedding: Tensor
    head: Tensor


class Stream:
    """Micro-batches by number: the same number and the same shards give the same records."""

    def __init__(self, folder: Path, settings: DrafterSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.shards: dict[Path, Shard] = {}
        self.scanned = -RESCAN_STEPS * settings.micro_batches

    def records(self, number: int) -> tuple[list[Record], torch.Generator]:
        """Sequences of one shard, and the generator for the rest of this micro-batch's draws."""
        if number - self.scanned >= RESCAN_STEPS * self.settings.micro_batches:
            self.scanned = number
            found = shard_paths(self.folder)
            self.shards = {path: self.shards.get(path) or Shard(path) for path in found}
            if not found:
                raise SystemExit(f"{self.folder} has no shards yet: run the stage data first")
        generator = torch.Generator().manual_seed(1_000_000_007 * self.settings.seed + number)
        shards = list(self.shards.values())
        shard = shards[int(torch.randint(len(shards), (1,), generator=generator))]
        chosen = torch.randperm(len(shard), generator=generator)[: self.settings.sequences]
        records = [shard.record(index) for index in chosen.tolist()]
        return [r for r in records if len(r.ids) - r.prompt > 1], generator


def write_checkpoint(path: Path, model: Drafter, average: list[Tensor], worker: Worker, best: float) -> None:
    """Everything a later run needs, written whole or not at all."""
    state = {
        "model": model.state_dict(), "average": average, "worker": worker.state(), "best": best,
        "elapsed_s": worker.elapsed_s,
    }  # fmt: skip
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class Keeper:
    """The first worker's tasks apart from training: averaged weights, measuring, checkpoints, the log."""

    def __init__(self, work: Path, worker: Worker, model: Drafter, tables: Tables, settings: Settings) -> None:
        self.work = work
        self.worker = worker
        self.model = model
        self.tables = tables
        self.settings = settings
        self.log = Log(work / "train.log")
        self.best = 0.0
        self.average = [p.detach().clone() for p in model.parameters()]
        self.records = Shard(work / "validation.safetensors").records()
        self.due_line = self.due_check = 0.0
        self.due_save = time.monotonic() + settings.checkpoint_s

    def resume(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.due_check = time.monotonic() + self.settings.validation.every_s
        for mine, value in zip(self.average, state["average"], strict=True):
            mine.copy_(value)

    def after_step(self, loss: float, stop: bool) -> None:
        worker, d = self.worker, self.settings.drafter
        keep = min(d.average, (1 + worker.steps) / (10 + worker.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - keep)
        self.log.average(loss)
        now = time.monotonic()
        if now >= self.due_line or stop:
            self.due_line = now + 60
            positions = worker.steps * d.micro_batches * d.sequences * d.anchors * d.block
            elapsed = round(worker.elapsed_s)
            self.log.write(step=worker.steps, elapsed_s=elapsed, positions=positions, now=round(loss, 4))
        if now >= self.due_check or worker.is_done:
            self.due_check = time.monotonic() + self.settings.validation.every_s
            self.measure()
        if now >= self.due_save or stop:
            self.due_save = time.monotonic() + self.settings.checkpoint_s
            write_checkpoint(self.work / "checkpoint.pt", self.model, self.average, worker, self.best)

    def measure(self) -> None:
        """Tokens per round of the averaged weights as they would be published; the best so far are kept."""
        budget = self.settings.validation.budget
        shown = averaged(self.model, self.average)
        found = tokens_per_round(shown, self.records, self.tables.embedding, self.tables.head, (budget,))
        facts = {"step": self.worker.steps, "elapsed_s": round(self.worker.elapsed_s), **found}
        self.log.write(**facts)
        if found[f"ddtree-{budget}"] > self.best:
            self.best = found[f"ddtree-{budget}"]
            export(shown, self.work / "best", facts)


def _work(
    rank: int, shared: Shared, model: Drafter, tables: Tables, settings: Settings, work: Path, mask: int
) -> None:  # fmt: skip
    """One worker."""
    d, device = settings.drafter, model.fc.weight.device
    stream, checkpoint = Stream(work / "data", d), work / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True, map_location=device) if checkpoint.exists() else None
    rates = Rates(d.adam_rate, d.muon_rate, d.weight_decay, d.warmup, 1 - d.decay, d.seconds, d.steps)
    worker = Worker(
        shared, rank, model, rates, state["elapsed_s"] if state else 0.0, state["worker"] if state else None
    )
    keeper = Keeper(work, worker, model, tables, settings) if rank == 0 else None
    if keeper is not None and state is not None:
        keeper.resume(state)
    del state

    def loss_of(model: Drafter, number: int) -> Tensor:
        records, generator = stream.records(number)
        block = min(d.block, d.short_block) if number % d.micro_batches else d.block
        anchor = random_anchors(records, d.anchors * d.block // block, generator)
        blocks = drop_channels(make_blocks(records, anchor, block, mask, device), d.tap_dropout, generator)
        states = draft_states(model, tables.embedding, blocks, block)
        return block_loss(states, blocks, tables.head, d, generator)

    stop = worker.is_done
    while not stop:
        loss, stop = worker.step(d.micro_batches, loss_of)
        if keeper is not None:
            keeper.after_step(loss, stop)


def train(model: Drafter, tables: Tables, settings: Settings, work: Path, mask: int, workers: int) -> None:
    """Train `model`, or go on from work/checkpoint.pt; SIGTERM and SIGINT end the run after a last checkpoint.

    Reads work/data and work/validation.safetensors; writes work/{checkpoint.pt, train.log, best/}. The schedule is a
    function of the step, or of the time trained (`settings.drafter.steps`, `.seconds`), so a run may be stopped,
    continued and prolonged at will.
    """
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    launch(_work, workers, model, tables, settings, work, mask, ends=True)
