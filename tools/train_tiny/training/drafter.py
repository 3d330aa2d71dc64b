"""Training of the DFlash drafter on stored states of the frozen target.

Letters: N sequences of a micro-batch, A anchors a sequence, B block size, T tokens of the longest sequence. An anchor
is the position of a bonus token: the block holds it and B-1 masks, sees the target's states before it, and is to name
the B-1 tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.export import drafter_config, save
from tools.train_tiny.log import Log
from tools.train_tiny.model import Drafter, Target, load_drafter, load_target
from tools.train_tiny.settings import MASK, DrafterSettings, TargetSettings

from .draft_data import GREEDY, DraftSet, stem_of
from .parallel import Rates, Shared, Worker, launch

VALIDATION = 24
"""Sequences of each worker's file kept for measuring."""


@dataclass(frozen=True)
class Blocks:
    """One micro-batch of blocks."""

    taps: Tensor  # [N, T, K*H]
    ids: Tensor  # [N, A*B], bonus and masks
    positions: Tensor  # [N, A*B]
    anchor: Tensor  # [N, A], also the number of context rows that each block sees
    labels: Tensor  # [N, A, B-1]
    valid: Tensor  # [N, A, B-1], False past the end
    final: Tensor  # [N, A, B-1, H], the target's states that predict the labels
    kinds: Tensor  # [N]


def fresh(target: Target, shape: TargetSettings, settings: DrafterSettings) -> Drafter:
    """Start from the target's last layers; `fc` passes the deepest tapped state through."""
    torch.manual_seed(settings.seed)
    model = Drafter(drafter_config(shape, settings))
    with torch.no_grad():
        for layer, source in zip(model.layers, target.layers[-settings.layers :], strict=True):
            layer.load_state_dict(source.state_dict())
        model.norm.load_state_dict(target.norm.state_dict())
        torch.nn.init.normal_(model.fc.weight, std=0.02)
        model.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
    return model.requires_grad_(True)


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
        ids=inputs.view(count, -1),
        positions=positions.view(count, -1),
        anchor=anchor,
        labels=ids.gather(1, reachable).view(count, anchors, block - 1),
        valid=valid,
        final=final.gather(1, predicting).view(count, anchors, block - 1, -1),
        kinds=torch.from_numpy(data.kinds[chosen]),
    )


def draft_logits(model: Drafter, target: Target, blocks: Blocks, block: int) -> Tensor:
    """Logits [N, A, B-1, V] of the masked positions."""
    count, dtype = len(blocks.ids), model.fc.weight.dtype
    context = model.context(blocks.taps.to(dtype), torch.arange(blocks.taps.shape[1]))
    hidden = model(target.embed_tokens(blocks.ids).to(dtype), blocks.positions, context, blocks.anchor)
    return target.head(hidden.view(count, -1, block, hidden.shape[-1])[:, :, 1:].to(target.norm.weight.dtype)).float()


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
def accepted(
    model: Drafter, target: Target, data: DraftSet, chosen: Any, settings: DrafterSettings
) -> dict[str, float]:
    """Mean tokens a round of the chain at random anchors of greedy text, and how often the first draft is right."""
    generator, runs = torch.Generator().manual_seed(2), []
    for begin in range(0, len(chosen), 8):
        blocks = make_blocks(data, chosen[begin : begin + 8], settings, generator)
        hits = (draft_logits(model, target, blocks, settings.block).argmax(-1) == blocks.labels) & blocks.valid
        runs.append(hits.cumprod(-1).flatten(0, 1))
    run = torch.cat(runs).float()
    return {"tokens_per_round": round(1 + run.sum(-1).mean().item(), 3), "first": round(run[:, 0].mean().item(), 3)}


def _work(rank: int, shared: Shared, model: Drafter, settings: DrafterSettings, files: dict[str, Path]) -> None:
    """One worker process, on its own file of sequences."""
    torch.set_num_threads(1)
    target, data = load_target(files["target"]).bfloat16(), DraftSet.load(stem_of(files["data"], rank))
    order = np.random.default_rng(settings.seed).permutation(len(data.lengths))
    greedy = order[data.kinds[order] == GREEDY]
    check = greedy[:VALIDATION]
    learn = np.setdiff1d(np.arange(len(data.lengths)), check)  # sequences are stored by length, so neighbours are alike
    generator = torch.Generator().manual_seed(1000 + rank)
    size = settings.sequences_per_micro

    def loss_of(model: Drafter, _: int) -> Tensor:
        begin = int(torch.randint(0, len(learn) - size, (1,), generator=generator))
        blocks = make_blocks(data, learn[begin : begin + size], settings, generator)
        return block_loss(draft_logits(model, target, blocks, settings.block), blocks, target, settings.position_decay)

    rates = Rates(
        settings.adam_rate, settings.muon_rate, settings.weight_decay,
        settings.warmup_steps, settings.plateau, settings.seconds,
    )  # fmt: skip
    worker = Worker(shared, rank, model, rates)
    log = Log(files["log"]) if rank == 0 else None
    due_line, due_check, stop = 0.0, settings.checkpoint_s, False
    while not stop:
        loss, stop = worker.step(settings.micro_batches, loss_of)
        if log is None:
            continue
        log.average(loss)
        seen = worker.steps * settings.micro_batches * size * settings.anchors
        if worker.elapsed_s >= due_line:
            due_line = worker.elapsed_s + 20
            log.write(step=worker.steps, elapsed_s=round(worker.elapsed_s), blocks=seen)
        if worker.elapsed_s >= due_check or stop:
            due_check = worker.elapsed_s + settings.checkpoint_s
            save(model, model.cfg, files["out"] if stop else files["partial"])
            log.write(elapsed_s=round(worker.elapsed_s), blocks=seen, **accepted(model, target, data, check, settings))


def train(
    settings: DrafterSettings, shape: TargetSettings, workers: int, files: dict[str, Path], init: Path | None
) -> None:
    """Train from the target's last layers, or from the drafter in `init` (same shape, any block size).

    files: target, data (read); log, partial, out (written).
    """
    model = fresh(load_target(files["target"]), shape, settings)
    if init is not None:
        model.load_state_dict(load_drafter(init).state_dict())
    launch(_work, workers, model, settings, files)
