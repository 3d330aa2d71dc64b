"""Batched answers of the target with its tapped states and its most probable tokens at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .target import Target


@dataclass(frozen=True)
class Record:
    """One conversation. The last token's states and choices were never computed: those rows are zero."""

    ids: list[int]  # [S], prompt and answer
    prompt: int  # tokens of the prompt
    temperature: float
    taps: Tensor  # [S, K·H] bf16
    top_ids: Tensor  # [S, k] int32, the most probable next tokens
    top_logits: Tensor  # [S, k] bf16


@torch.no_grad()
def answer_batch(
    target: Target, prompts: Sequence[Sequence[int]], temperatures: Tensor, max_new: int, top_k: int, kept: int,
    generator: torch.Generator, whole: bool = False,
) -> list[Record]:  # fmt: skip
    """Answers up to and with a stop token, at most `max_new` tokens each.

    temperatures [N]: 0 is greedy. Prompts are padded on the left. Rows that have ended leave the batch when a quarter
    of it has; unless `whole`, what is left when seven eighths have ended is cut off there, since short batches cost as
    much as full ones.
    """
    from transformers import DynamicCache

    device, count, width = target.embedding.device, len(prompts), max(map(len, prompts))
    ids = torch.zeros((count, width + max_new), dtype=torch.long, device=device)
    seen = torch.zeros_like(ids)
    pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt, device=device)
        seen[row, width - len(prompt) :] = 1
    depth = len(target.taps) * target.embedding.shape[1]
    taps = torch.zeros((count, width + max_new, depth), dtype=torch.bfloat16, device=device)
    top_ids = torch.zeros((count, width + max_new, kept), dtype=torch.int32, device=device)
    top_logits = torch.zeros((count, width + max_new, kept), dtype=torch.bfloat16, device=device)
    temperatures, stops = temperatures.to(device), torch.tensor(sorted(target.stops), device=device)
    alive, ends = torch.arange(count, device=device), torch.zeros(count, dtype=torch.long, device=device)
    cache, new, past = DynamicCache(config=target.config), ids[:, :width], 0
    for length in range(width, width + max_new):
        positions = (torch.arange(past, length, device=device) - pads[alive, None]).clamp(min=0)
        states, tapped = target.forward(
            new, attention_mask=seen[alive, :length], position_ids=positions, past_key_values=cache
        )
        logits, choices = (states[:, -1] @ target.head.T).topk(min(top_k, len(target.head)), -1)
        taps[alive, past:length] = tapped.bfloat16()
        top_ids[alive, length - 1] = choices[:, :kept].int()
        top_logits[alive, length - 1] = logits[:, :kept].bfloat16()
        weights = torch.softmax(logits.float() / temperatures[alive, None].clamp(min=1e-3), -1)
        drawn = torch.multinomial(weights, 1, generator=generator)
        token = torch.where(temperatures[alive, None] > 0, choices.gather(1, drawn), choices[:, :1])
        running = ends[alive] == 0
        ids[alive[running], length] = token[running, 0]
        ends[alive[running & torch.isin(token[:, 0], stops)]] = length + 1
        running = ends[alive] == 0
        left = int(running.sum())
        if left * 8 < count * (not whole) or not left or length + 1 == width + max_new:
            ends[ends == 0] = length + 1
            break
        if left < 0.75 * len(alive):
            alive = alive[running]
            cache.batch_select_indices(running.nonzero()[:, 0])
        new, past = ids[alive, length : length + 1], length
    return [
        Record(
            ids[row, start:end].tolist(), width - start, float(temperatures[row]),
            _without_last(taps[row, start:end]), _without_last(top_ids[row, start:end]),
            _without_last(top_logits[row, start:end]),
        )
        for row, (start, end) in enumerate(zip(pads.tolist(), ends.tolist(), strict=True))
    ]  # fmt: skip


def _without_last(rows: Tensor) -> Tensor:
    """The rows on the CPU with the last one zero: a batch may have computed it, alone generation would not have."""
    rows = rows.cpu().clone()
    rows[-1] = 0
    return rows
