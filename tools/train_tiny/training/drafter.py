"""Training of the drafters on stored states of the frozen target: DFlash, DSpark and EAGLE-3.

Letters: N sequences of a micro-batch, A anchors a sequence, B block size, T tokens of the longest sequence. An anchor
is the position of a bonus token, from which a drafter is to name the B-1 tokens after it. DFlash sees the bonus token,
B-1 masks and the target's states before them; DSpark also the true token before each one; EAGLE-3 makes B-1 steps, each
with the true token before and its own feature of the step before, as it will have to when it drafts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import eagle
from tools.train_tiny.eagle import Eagle3
from tools.train_tiny.export import drafter_config, eagle3_config, save
from tools.train_tiny.log import Log
from tools.train_tiny.model import Drafter, Target, load_drafter, load_target
from tools.train_tiny.settings import MASK, DrafterSettings, Eagle3Settings, TargetSettings

from .draft_data import GREEDY, DraftSet, stem_of
from .parallel import Rates, Shared, Worker, launch

VALIDATION = 24
"""Sequences of each worker's file kept for measuring."""


@dataclass(frozen=True)
class Blocks:
    """One micro-batch of blocks."""

    taps: Tensor  # [N, T, K*H]
    tokens: Tensor  # [N, T]
    ids: Tensor  # [N, A*B], bonus and masks
    positions: Tensor  # [N, A*B]
    anchor: Tensor  # [N, A], also the number of context rows that each block sees
    labels: Tensor  # [N, A, B-1]
    before: Tensor  # [N, A, B-1], the token before each label
    valid: Tensor  # [N, A, B-1], False past the end
    final: Tensor  # [N, A, B-1, H], the target's states that predict the labels
    kinds: Tensor  # [N]


def fresh(target: Target, shape: TargetSettings, settings: DrafterSettings) -> Drafter:
    """A DFlash or DSpark drafter from the target's last layers; `fc` passes the deepest tapped state through."""
    torch.manual_seed(settings.seed)
    model = Drafter(drafter_config(shape, settings))
    with torch.no_grad():
        for layer, source in zip(model.layers, target.layers[-settings.layers :], strict=True):
            layer.load_state_dict(source.state_dict())
        model.norm.load_state_dict(target.norm.state_dict())
        torch.nn.init.normal_(model.fc.weight, std=0.02)
        model.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
        if model.markov_head is not None:  # it adds nothing at first
            torch.nn.init.zeros_(model.markov_head.markov_w2.weight)
    model.requires_grad_(not settings.body_frozen)
    if model.markov_head is not None:
        model.markov_head.requires_grad_(True)
    return model


def make_blocks(data: DraftSet, chosen: Any, settings: DrafterSettings, generator: torch.Generator) -> Blocks:
    """Blocks at random anchors in the answers of the chosen sequences."""
    anchors, block, count = settings.anchors, settings.block, len(chosen)
    lengths, prompts = torch.from_numpy(data.lengths[chosen]), torch.from_numpy(data.prompts[chosen])
    width = int(lengths.max())

    def padded(store: Any, dtype: torch.dtype) -> Tensor:
        out = torch.zeros((count, width, *store.shape[1:]), dtype=dtype)
        for row, index in enumerate(chosen):
            start, length = int(data.starts[index]), int(data.lengths[index])
            out[row, :length] = torch.from_numpy(np.array(store[start : start + length])).to(dtype)
        return out

    ids = padded(data.ids.astype(np.int32, copy=False), torch.long)
    span = (lengths - 1 - prompts).clamp(min=1)
    anchor = prompts[:, None] + (torch.rand(count, anchors, generator=generator) * span[:, None]).long()
    anchor = anchor.clamp(max=width - 2)
    positions = anchor[:, :, None] + torch.arange(block)
    places = positions[:, :, 1:]
    valid, reachable = places < lengths[:, None, None], places.clamp(max=width - 1).reshape(count, -1)
    inputs = torch.full((count, anchors, block), MASK)
    inputs[:, :, 0] = ids.gather(1, anchor)
    final = padded(data.final, torch.float32)
    predicting = (reachable - 1)[..., None].expand(-1, -1, final.shape[-1])
    return Blocks(
        taps=padded(data.taps, torch.float32),
        tokens=ids,
        ids=inputs.view(count, -1),
        positions=positions.view(count, -1),
        anchor=anchor,
        labels=ids.gather(1, reachable).view(count, anchors, block - 1),
        before=ids.gather(1, reachable - 1).view(count, anchors, block - 1),
        valid=valid,
        final=final.gather(1, predicting).view(count, anchors, block - 1, -1),
        kinds=torch.from_numpy(data.kinds[chosen]),
    )


Model = Drafter | Eagle3


def draft_logits(model: Model, target: Target, blocks: Blocks) -> Tensor:
    """Logits [N, A, B-1, V] of the tokens after each anchor."""
    dtype = model.fc.weight.dtype
    if isinstance(model, Eagle3):
        features, past = model.context(target, blocks.taps.to(dtype), blocks.tokens.roll(-1, 1))
        return model.logits(target, model.unroll(target, features, past, blocks.anchor - 1, blocks.before))
    context = model.context(blocks.taps.to(dtype), torch.arange(blocks.taps.shape[1]))
    hidden = model(target.embed_tokens(blocks.ids).to(dtype), blocks.positions, context, blocks.anchor)
    masked = hidden.view(*blocks.anchor.shape, -1, hidden.shape[-1])[:, :, 1:]
    logits = target.head(masked.to(target.norm.weight.dtype)).float()
    return logits if model.markov_head is None else logits + model.markov_head(blocks.before).float()


def block_loss(logits: Tensor, blocks: Blocks, target: Target, decay: float) -> Tensor:
    """Cross entropy weighted by exp(-(k-1)/decay) at draft position k.

    The truth is the token itself on greedy text and the target's own distribution elsewhere.
    """
    weights = torch.exp(-torch.arange(logits.shape[2]) / decay) * blocks.valid
    greedy = blocks.kinds == GREEDY
    losses = torch.zeros(blocks.labels.shape)
    if greedy.any():
        hard = F.cross_entropy(logits[greedy].flatten(0, 2), blocks.labels[greedy].flatten(), reduction="none")
        losses[greedy] = hard.view(losses[greedy].shape)
    if not greedy.all():
        with torch.no_grad():
            final = blocks.final[~greedy].to(target.norm.weight.dtype)
            truth = torch.softmax(target.head(final).float(), -1)
        losses[~greedy] = -(truth * torch.log_softmax(logits[~greedy], -1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


@torch.no_grad()
def accepted(model: Model, target: Target, data: DraftSet, chosen: Any, settings: DrafterSettings) -> dict[str, float]:
    """Mean tokens a round of the chain at random anchors of greedy text, and how often the first draft is right.

    Up to the first wrong draft the true tokens before are the drafter's own, so one pass gives what drafting would.
    """
    generator, runs = torch.Generator().manual_seed(2), []
    for begin in range(0, len(chosen), 8):
        blocks = make_blocks(data, chosen[begin : begin + 8], settings, generator)
        hits = (draft_logits(model, target, blocks).argmax(-1) == blocks.labels) & blocks.valid
        runs.append(hits.cumprod(-1).flatten(0, 1))
    run = torch.cat(runs).float()
    return {"tokens_per_round": round(1 + run.sum(-1).mean().item(), 3), "first": round(run[:, 0].mean().item(), 3)}


def write_checkpoint(path: Path, model: Model, worker: Worker, processor_s: float) -> None:
    """All that a later run needs to go on, written whole or not at all."""
    partial = path.with_suffix(".new")
    times = {"elapsed_s": worker.elapsed_s, "processor_s": processor_s}
    torch.save({"model": model.state_dict(), "worker": worker.state(), **times}, partial)
    os.replace(partial, path)


def _work(rank: int, shared: Shared, model: Model, settings: DrafterSettings, files: dict[str, Path]) -> None:
    """One worker process, on its share of the files of sequences."""
    torch.set_num_threads(1)
    target = load_target(files["target"]).bfloat16()
    stems = [stem_of(files["data"], number) for number in range(len(list(files["data"].glob("draft-*.npz"))))]
    sets = [DraftSet.load(stem) for stem in stems[rank :: shared.workers]]
    order = np.random.default_rng(settings.seed).permutation(len(sets[0].lengths))
    check = order[sets[0].kinds[order] == GREEDY][:VALIDATION]
    # Sequences are stored by length, so neighbours are alike.
    learn = [np.setdiff1d(np.arange(len(data.lengths)), check if data is sets[0] else []) for data in sets]
    state = torch.load(files["partial"], weights_only=True) if files["partial"].exists() else None
    generator = torch.Generator().manual_seed(1000 + rank + (state["worker"]["steps"] if state else 0))
    size = settings.sequences_per_micro

    def loss_of(model: Model, _: int) -> Tensor:
        number = int(torch.randint(0, len(sets), (1,), generator=generator))
        begin = int(torch.randint(0, len(learn[number]) - size, (1,), generator=generator))
        blocks = make_blocks(sets[number], learn[number][begin : begin + size], settings, generator)
        return block_loss(draft_logits(model, target, blocks), blocks, target, settings.position_decay)

    rates = Rates(
        settings.adam_rate, settings.muon_rate, settings.weight_decay,
        settings.warmup_steps, settings.plateau, settings.seconds, settings.steps,
    )  # fmt: skip
    worker = Worker(
        shared, rank, model, rates, state["elapsed_s"] if state else 0.0, state["worker"] if state else None
    )
    log = Log(files["log"]) if rank == 0 else None
    measured = replace(settings, block=settings.measured_block or settings.block)
    due_line, due_check, stop = 0.0, worker.elapsed_s + settings.checkpoint_s, worker.is_done
    while not stop:
        loss, stop = worker.step(settings.micro_batches, loss_of)
        if log is None:
            continue
        log.average(loss)
        seen = worker.steps * settings.micro_batches * size * settings.anchors
        processor_s = time.process_time() + (state["processor_s"] if state else 0.0)
        facts = {"elapsed_s": round(worker.elapsed_s), "processor_s": round(processor_s), "blocks": seen}
        if worker.elapsed_s >= due_line:
            due_line = worker.elapsed_s + 20
            log.write(step=worker.steps, **facts)
        if worker.elapsed_s >= due_check or stop:
            due_check = worker.elapsed_s + settings.checkpoint_s
            write_checkpoint(files["partial"], model, worker, processor_s)
            log.write(**facts, **accepted(model, target, sets[0], check, measured))
    if log is not None and worker.is_done:
        save(model, model.cfg, files["out"])
        files["partial"].unlink(missing_ok=True)


def train(
    settings: DrafterSettings, shape: TargetSettings, workers: int, files: dict[str, Path], init: Path | None
) -> None:
    """Train from the target's last layers, or from the DFlash drafter in `init` (same shape, any block size).

    SIGTERM and SIGINT end the run after a checkpoint, from which the same command goes on. files: target, data (read);
    log, partial (the checkpoint), out (written).
    """
    target = load_target(files["target"])
    if isinstance(settings, Eagle3Settings):
        model: Model = eagle.fresh(target, eagle3_config(shape, settings), settings.seed)
    else:
        model = fresh(target, shape, settings)
        if init is not None:
            model.load_state_dict(load_drafter(init).state_dict(), strict=model.markov_head is None)
    if files["partial"].exists():
        model.load_state_dict(torch.load(files["partial"], weights_only=True)["model"])
    launch(_work, workers, model, settings, files, ends=True)
