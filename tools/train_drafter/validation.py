"""Tokens per round on stored greedy answers: what decoding would give, without decoding.

At temperature 0 the target's answer does not depend on the drafts, so the rounds follow from the drafts at every
position of the answer that the target would give anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tools.train_tiny.model import Drafter
from tools.train_tiny.trees import Tree, best_first, chain

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


def accepted(tree: Tree, ranked: list[list[int]], truth: Sequence[int]) -> int:
    """How many drafts of the tree, whose tokens are ranks in `ranked` by depth, lie on the path `truth`."""
    node, depth = 0, 0
    children = {
        (parent, ranked[place - 1][rank]): number
        for number, (rank, parent, place) in enumerate(zip(tree.tokens, tree.parents, tree.depths, strict=True), 1)
    }
    while depth < len(truth) and (node, truth[depth]) in children:
        node, depth = children[node, truth[depth]], depth + 1
    return depth


def rounds(values: Tensor, indices: Tensor, answer: Sequence[int], make_tree: Callable[[Tensor], Tree]) -> list[int]:
    """Tokens of every round of an answer; the first token is the prefill's and belongs to none."""
    place, counts = 0, []
    while place + 1 < len(answer):
        truth = answer[place + 1 :]
        found = accepted(make_tree(values[place]), indices[place].tolist(), truth)
        counts.append(min(found + 1, len(truth)))
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
    trees = {f"ddtree-{budget}": functools.partial(best_first, budget=budget) for budget in budgets}
    makers: dict[str, Callable[[Tensor], Tree]] = {"chain": chain, **trees}
    counts: dict[str, list[int]] = {name: [] for name in makers}
    hits = places = 0
    for record in records:
        answer = record.ids[record.prompt :]
        if len(answer) < 2:
            continue
        values, indices = drafts(model, record, embedding, head, max(budgets), shortlist)
        for name, maker in makers.items():
            counts[name] += rounds(values, indices, answer, maker)
        hits += int((indices[:, 0, 0] == torch.tensor(answer[1:])).sum())
        places += len(answer) - 1
    means = {name: round(sum(found) / max(1, len(found)), 3) for name, found in counts.items()}
    return {**means, "first": round(hits / max(1, places), 3)}
