"""Tokens per round on stored greedy answers: what decoding would give, without decoding.

At temperature 0 the target's answer does not depend on the drafts, so the rounds follow from the drafts at every
position of the answer that the target would give anyway. Up to the first wrong draft the true tokens before are the
drafter's own, so one pass gives what drafting would.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ddtree_trt.drafters.dflash.heads import MARKOV_CANDIDATES
from ddtree_trt.runtime.tree import Bilinear, Candidates, Marginals
from workbench.ablate import chain, heap, replay
from workbench.drafts import Text

from .blocks import Blocks, cut_blocks, read_texts
from .model import DFlash, Drafter
from .target import Answer, Target

CHUNK = 48
"""Anchors drafted at once: all the logits of a long answer would be large."""


@torch.no_grad()
def drafts(
    model: Drafter, target: Target, answer: Answer, top: int, shortlist: Tensor | None = None
) -> list[list[Candidates]]:
    """For each answer of a conversation the drafts at every position but the last, `top` candidates each or what
    DSpark's head reads; with a shortlist [V'], of its tokens only."""
    texts, found = read_texts(target, [answer]), list[list[Candidates]]()
    for begin, end in answer.spans:
        chunks = torch.arange(begin, max(begin + 1, end - 1)).split(CHUNK)
        of_chunk = partial(_candidates, model, target, top=top, shortlist=shortlist)
        found.append([c for anchor in chunks for c in of_chunk(cut_blocks(texts, anchor[None], model.block))])
    return found


def _candidates(model: Drafter, target: Target, blocks: Blocks, top: int, shortlist: Tensor | None) -> list[Candidates]:
    head = target.head if shortlist is None else target.head[shortlist]
    states = model.drafts(blocks, target.embedding)[0]
    markov = model.markov_head if isinstance(model, DFlash) else None
    logits = (states.to(head.dtype) @ head.T).float()
    if markov is None:
        logits, top = logits.log_softmax(-1), min(top, len(head))
    else:
        top = min(MARKOV_CANDIDATES, len(head))
    best, ids = logits.topk(top, -1)
    drafted, ids = ids, ids if shortlist is None else shortlist.to(ids.device)[ids]
    values, tokens = best.cpu().numpy(), ids.int().cpu().numpy()
    if markov is None:
        return [Marginals(*each) for each in zip(values, tokens, strict=True)]
    anchors = blocks.before[0, :, :1, None].expand(-1, 1, top)
    left = markov.markov_w1(torch.cat([anchors, ids[:, :-1]], 1)).float().cpu().numpy()
    right = markov.markov_w2.weight[drafted].float().cpu().numpy()
    return [Bilinear(*each) for each in zip(values, tokens, left, right, strict=True)]


def rounds(drafts: Sequence[Candidates], answer: Sequence[int], budget: int | None, depth: int) -> list[int]:
    """Tokens of every round of an answer by trees of so many drafts, or the chain; its first token belongs to none."""
    grow = partial(heap, nodes=budget, depth=depth) if budget else partial(chain, nodes=depth, depth=depth)
    return list(replay([Text(answer, drafts[: len(answer) - 1])], grow).lengths[0])


def tokens_per_round(
    model: Drafter,
    target: Target,
    answers: Sequence[Answer],
    budgets: Sequence[int],
    shortlist: Tensor | None = None,
    behind: int = 0,
) -> dict[str, float]:
    """Of the chain, and of a block drafter's trees of so many drafts, all rounds alike, in answers behind `behind`
    tokens or more; `first`: how often the first draft is right."""
    budgets = budgets if isinstance(model, DFlash) else ()
    kinds: dict[str, int | None] = {"chain": None, **{f"ddtree-{b}": b for b in budgets}}
    counts: dict[str, list[int]] = {name: [] for name in kinds}
    hits = places = 0
    for answer in answers:
        spans = tuple(span for span in answer.spans if span[0] >= behind and span[1] - span[0] > 1)
        wanted = Answer(answer.ids, spans, answer.temperature)
        for told, found in zip(
            wanted.told, drafts(model, target, wanted, max(budgets, default=1), shortlist), strict=True
        ):
            for name, budget in kinds.items():
                counts[name] += rounds(found, told, budget, model.block - 1)
            hits += sum(
                int(draft.child_log_probs([0]).token_ids[0, 0]) == t for draft, t in zip(found, told[1:], strict=True)
            )
            places += len(told) - 1
    means = {name: round(sum(found) / max(1, len(found)), 3) for name, found in counts.items()}
    return {**means, "first": round(hits / max(1, places), 3)}
