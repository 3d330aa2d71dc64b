"""Batched continuation of prompts by the target, greedy or at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import Target
from .settings import EOS, PAD


@torch.no_grad()
def continue_batch(
    target: Target, prompts: Sequence[Sequence[int]], sampled: Tensor, max_new: int, generator: torch.Generator
) -> list[list[int]]:
    """Answers up to and with EOS, at most max_new tokens each.

    sampled [N] is True for rows at temperature 1. Prompts are padded on the left; rows that have ended leave the
    batch as soon as a quarter of it has.
    """
    count, width = len(prompts), max(map(len, prompts))
    ids = torch.full((count, width), PAD)
    seen = torch.zeros(count, 1, 1, width + max_new, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        seen[row, :, :, width - len(prompt) :] = True
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    own = torch.eye(width, dtype=torch.bool)  # a pad looks at itself, so that no row of the softmax is empty
    mask = causal & (seen[..., :width] | own)
    cache = target.new_cache(count, width + max_new)
    positions = (torch.arange(width) - pads[:, None]).clamp(min=0)
    hidden, _ = target(ids, cache=cache, positions=positions, mask=mask)
    alive = torch.arange(count)
    answers: list[list[int]] = [[] for _ in range(count)]
    ended = torch.zeros(count, dtype=torch.bool)
    for length in range(width, width + max_new):
        logits = target.head(hidden[:, -1])
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
        token = torch.where(sampled[alive], drawn, logits.argmax(-1))
        for row, value in zip(alive.tolist(), token.tolist(), strict=True):
            if not ended[row]:
                answers[row].append(value)
        ended[alive] |= token == EOS
        running = ~ended[alive]
        if not running.any():
            break
        if running.float().mean() < 0.75:
            alive, token = alive[running], token[running]
            cache = [(k[running], v[running]) for k, v in cache]
        if length + 1 < width + max_new:
            hidden, _ = target(
                token[:, None],
                cache=cache,
                past=length,
                positions=(length - pads[alive])[:, None],
                mask=seen[alive, :, :, : length + 1],
            )
    return answers
