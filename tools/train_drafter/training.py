"""A drafter's training: blocks of the stored answers, with the target's states computed anew in every step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import data
from .blocks import block_loss, cut_blocks, drop_channels, random_anchors, read_texts
from .drafter import drafter_config, fresh, read_shortlist, save
from .loop import Log, Run, train
from .model import DFlash, Drafter, load_drafter
from .settings import DrafterSettings
from .target import Target
from .validation import tokens_per_round

RESCAN_STEPS = 20
"""How often to look for new answers."""


def train_drafter(
    target: Target,
    settings: DrafterSettings,
    mask: int,
    work: Path,
    answers: Path,
    init: Path | None = None,
    budget: int = 16,
) -> bool:
    """Train a drafter on the pools in `answers`, or go on from work/checkpoint.pt; whether the end was reached.

    Reads validation.safetensors beside that folder; writes work/{checkpoint.pt, train.log, best/}. init: a drafter to
    begin with.
    """
    schedule = settings.schedule
    config = drafter_config(target.model.config.to_dict(), settings, target.taps, mask)
    model = fresh(config, target.model.state_dict(), target.model.config.num_hidden_layers, settings.seed)
    given = None if init is None else load_drafter(init)
    if given is not None:
        body = {name: value for name, value in given.state_dict().items() if "markov" not in name}
        model.load_state_dict(body, strict=False)
    if settings.frozen:
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("markov_head."))
    elif isinstance(model, DFlash) and model.markov_head is not None:
        tables, ids = (target.embedding, target.head), None if init is None else read_shortlist(init)
        model.markov_head.project(tables, getattr(given, "markov_head", None), ids)
    work.mkdir(parents=True, exist_ok=True)
    run = Run(model.to(target.embedding.device), schedule, work / "checkpoint.pt")
    stored, check = data.Answers(answers), data.read(answers.parent / "validation.safetensors")
    stored.scan()

    def loss_of(model: Drafter, number: int) -> Tensor:
        if number % (RESCAN_STEPS * schedule.micro_batches) == 0:
            stored.scan()
        generator = torch.Generator().manual_seed(1_000_000_007 * (settings.seed + 1) + number)
        block = min(settings.block, settings.short_block) if number % schedule.micro_batches else settings.block
        rows = stored.draw(settings.sequences, settings.tokens, generator)
        count = settings.anchors * settings.block * settings.sequences // (block * len(rows))
        anchor, end = random_anchors(rows, count, generator)
        texts = drop_channels(read_texts(target, rows), settings.tap_dropout, generator)
        return block_loss(model, cut_blocks(texts, anchor, block, end), target, settings)

    def measure(shown: Drafter) -> tuple[float, dict[str, Any]]:
        found = tokens_per_round(shown, target, check, (budget,))
        return found.get(f"ddtree-{budget}", found["chain"]), found

    return train(run, loss_of, measure, lambda shown: save(shown, config, work / "best"), Log(work / "train.log"))
