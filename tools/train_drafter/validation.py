"""Tokens per round on stored greedy answers: what decoding would give, without decoding.

At temperature 0 the target's answer does not depend on the drafts, so the rounds follow from the drafts at every
position of the answer that the target would give anyway. Up to the first wrong draft the true tokens before are the
drafter's own, so one pass gives what drafting would.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ddtree_trt.runtime.candidates import Marginals
from workbench.ablate import chain, heap, replay
from workbench.drafts import Text

from .blocks import cut_blocks, read_texts
from .model import DFlash, Drafter
from .target import Answer, Target

CHUNK = 48
"""Anchors drafted at once: all the logits of a long answer would be large."""


@torch.no_grad()
def drafts(
    model: Drafter, target: Target, answer: Answer, top: int, shortlist: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids [anchors, B-1, top] of the drafts at every position of the answer but the last; with a
    shortlist [V'], of its tokens only."""
    texts, head = read_texts(target, [answer]), target.head if shortlist is None else target.head[shortlist]
    values, indices = [], []
    for anchor in torch.arange(answer.prompt, max(answer.prompt + 1, len(answer.ids) - 1)).split(CHUNK):
        blocks = cut_blocks(texts, anchor[None], model.block)
        logits = model.logits(model.drafts(blocks, target.embedding), blocks.before, head)[0].float()
        best, ids = logits.log_softmax(-1).topk(min(top, len(head)), -1)
        values.append(best.cpu())
        indices.append(ids.cpu() if shortlist is None else shortlist[ids.cpu()])
    return torch.cat(values), torch.cat(indices)


def rounds(values: Tensor, indices: Tensor, answer: Sequence[int], budget: int | None) -> list[int]:
    """Tokens of every round of an answer by trees of so many drafts, or by the chain; the first token is the prefill's
    and belongs to none."""
    drafts = [Marginals(*draft) for draft in zip(values.numpy(), indices.int().numpy(), strict=True)]
    depth = values.shape[1]
    grow = partial(heap, nodes=budget, depth=depth) if budget else partial(chain, nodes=depth, depth=depth)
    return list(replay([Text(answer, drafts[: len(answer) - 1])], grow).lengths[0])


def tokens_per_round(
    model: Drafter, target: Target, answers: Sequence[Answer], budgets: Sequence[int], shortlist: Tensor | None = None
) -> dict[str, float]:
    """Of the chain, and of DFlash's trees of so many drafts, all rounds alike; `first`: how often the first draft is
    right."""
    trees = isinstance(model, DFlash) and model.markov_head is None
    kinds: dict[str, int | None] = {"chain": None, **({f"ddtree-{b}": b for b in budgets} if trees else {})}
    counts: dict[str, list[int]] = {name: [] for name in kinds}
    hits = places = 0
    for answer in answers:
        told = answer.ids[answer.prompt :]
        if len(told) < 2:
            continue
        values, indices = drafts(model, target, answer, max(budgets), shortlist)
        for name, budget in kinds.items():
            counts[name] += rounds(values, indices, told, budget)
        hits += int((indices[:, 0, 0] == torch.tensor(told[1:])).sum())
        places += len(told) - 1
    means = {name: round(sum(found) / max(1, len(found)), 3) for name, found in counts.items()}
    return {**means, "first": round(hits / max(1, places), 3)}
