"""Tokens per round on stored greedy answers: what decoding would give, without decoding.

At temperature 0 the target's answer does not depend on the drafts, so the rounds follow from the drafts at every
position of the answer that the target would give anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.tree import best_tree, descend
from tools.train_tiny.model import Drafter

from .blocks import draft_states, make_blocks
from .generation import Record

CHUNK = 48
"""Anchors drafted at once: all the logits of a long answer would be large."""


@torch.no_grad()
def drafts(
    model: Drafter, record: Record, embedding: Tensor, head: Tensor, top: int, shortlist: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids [anchors, B-1, top] of the drafts at every position of the answer but the last. With a
    shortlist [V'] of tokens, `head` has their rows only."""
    block, mask = int(model.cfg["block_size"]), int(model.cfg["dflash_config"]["mask_token_id"])
    values, indices = [], []
    for anchor in torch.arange(record.prompt, max(record.prompt + 1, len(record.ids) - 1)).split(CHUNK):
        blocks = make_blocks([record], anchor[None], block, mask, embedding.device)
        states = draft_states(model, embedding, blocks, block)[0].to(head.dtype)
        logits = (states.flatten(0, 1) @ head.T).float().view(*states.shape[:2], -1)
        best, ids = logits.topk(top, -1)
        values.append((best - logits.logsumexp(-1, keepdim=True)).cpu())
        indices.append((ids if shortlist is None else shortlist[ids]).cpu())
    return torch.cat(values), torch.cat(indices)


def _next(truth: Iterator[int], _: int) -> int | None:
    return next(truth, None)


def rounds(values: Tensor, indices: Tensor, answer: Sequence[int], budget: int, width: int | None) -> list[int]:
    """Tokens of every round of an answer by trees of so many drafts; the first token is the prefill's and belongs to
    none."""
    place, counts = 0, []
    while place + 1 < len(answer):
        truth = answer[place + 1 :]
        tree = best_tree(Marginals(values[place].numpy(), indices[place].int().numpy()), budget, width=width)
        counts.append(min(len(descend(tree, partial(_next, iter(truth)))), len(truth)))
        place += counts[-1]
    return counts


def tokens_per_round(
    model: Drafter,
    records: Sequence[Record],
    embedding: Tensor,
    head: Tensor,
    budgets: Sequence[int],
    shortlist: Tensor | None = None,
) -> dict[str, Any]:
    """Of the chain and of trees of so many drafts, all rounds alike; `first`: how often the first draft is right. With
    a shortlist [V'] of tokens it drafts from these only."""
    if shortlist is not None:
        head = head[shortlist]
    kinds: dict[str, tuple[int, int | None]] = {"chain": (int(model.cfg["block_size"]), 1)}
    kinds |= {f"ddtree-{budget}": (budget, None) for budget in budgets}
    counts: dict[str, list[int]] = {name: [] for name in kinds}
    hits = places = 0
    for record in records:
        answer = record.ids[record.prompt :]
        if len(answer) < 2:
            continue
        values, indices = drafts(model, record, embedding, head, max(budgets), shortlist)
        for name, (budget, width) in kinds.items():
            counts[name] += rounds(values, indices, answer, budget, width)
        hits += int((indices[:, 0, 0] == torch.tensor(answer[1:])).sum())
        places += len(answer) - 1
    means = {name: round(sum(found) / max(1, len(found)), 3) for name, found in counts.items()}
    return {**means, "first": round(hits / max(1, places), 3)}
