"""Methods: the ways to make a tree. Everything else about decoding is common to all of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engine import Draft
from ddtree_trt.runtime.sampling import DrawnFrom, Sampler
from ddtree_trt.runtime.tree import EMPTY, DraftTree, build_tree, chain

SAMPLED_CANDIDATES = 64  # K a sampled chain draws from: q may be any distribution, this one keeps nearly all mass

_DRAFTERS = {"ar": None, "dflash": "dflash", "ddtree": "dflash", "dflash-sample": "dflash", "draft-model": "autoregressive"}


@dataclass(frozen=True)
class Proposal:
    """A tree to verify. `drawn` [n] is given for chains whose tokens were drawn at random: the walk must then accept
    by the ratio of probabilities; otherwise the candidates are a fixed set and membership decides."""

    tree: DraftTree
    drawn: tuple[DrawnFrom, ...] = ()


NOTHING = Proposal(EMPTY)


def check_method(method: str, drafter_kind: str) -> None:
    """Raises UsageError when the engine's drafter cannot serve the method."""
    needs = _DRAFTERS[method]
    if needs not in (None, drafter_kind):
        able = [m for m, kind in _DRAFTERS.items() if kind in (None, drafter_kind)]
        raise UsageError(
            f"method {method!r} needs a {needs} drafter, this engine's is {drafter_kind}; it can do {', '.join(able)}"
        )


def candidates(method: str, budget: int, stochastic: bool) -> int:
    """K: how many candidates per position the method asks the drafter for."""
    if method == "ddtree":
        return budget
    return SAMPLED_CANDIDATES if stochastic and method in ("dflash-sample", "draft-model") else 1


def propose(method: str, draft: Draft, budget: int, sampler: Sampler) -> Proposal:
    """Turn the drafter's output into a tree of at most `budget` nodes."""
    if method == "ddtree":
        return Proposal(build_tree(draft.log_probs, draft.token_ids, budget))
    if method == "dflash":
        return Proposal(chain(draft.token_ids[:budget, 0], draft.log_probs[:budget, 0]))
    drawn = draft.drawn
    if drawn is None:
        rows = zip(draft.log_probs[:budget], draft.token_ids[:budget], strict=True)
        drawn = tuple(sampler.draft(log_probs, token_ids) for log_probs, token_ids in rows)
    return Proposal(chain([d.token for d in drawn]), drawn if sampler.params.stochastic else ())
