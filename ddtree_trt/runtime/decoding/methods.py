"""Methods: the ways to make a tree. Everything else about decoding is common to all of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.models.drafters.kinds import DrafterKind
from ddtree_trt.runtime.decoding.sampling import DrawnFrom, Sampler
from ddtree_trt.runtime.engines.base import Draft
from ddtree_trt.runtime.tree import EMPTY, DraftTree, build_tree, chain

SAMPLED_CANDIDATES = 64  # K a sampled chain draws from: q may be any distribution, this one keeps nearly all mass

_DRAFTERS = {
    "ar": None,
    "dflash": "dflash",
    "ddtree": "dflash",
    "dflash-sample": "dflash",
    "draft-model": "autoregressive",
}


@dataclass(frozen=True)
class Proposal:
    """A tree to verify. `drawn` [n] is given for chains whose tokens were drawn at random: the walk must then accept
    by the ratio of probabilities; otherwise the candidates are a fixed set and membership decides."""

    tree: DraftTree
    drawn: tuple[DrawnFrom, ...] = ()


NOTHING = Proposal(EMPTY)


def resolve_method(method: str, drafter_kind: str) -> str:
    """The method; `auto` is the best one the drafter can serve. Raises UsageError when it cannot serve another."""
    if method == "auto":
        return "ddtree" if drafter_kind == "dflash" else "draft-model"
    needs = _DRAFTERS[method]
    if needs not in (None, drafter_kind):
        able = [m for m, kind in _DRAFTERS.items() if kind in (None, drafter_kind)]
        raise UsageError(
            f"method {method!r} needs a drafter of kind {needs}, this engine's is {drafter_kind}; "
            f"it can do {', '.join(able)}"
        )
    return method


def default_budget(method: str, drafter: DrafterKind) -> int | None:
    """What `auto` is for a method that always drafts alike: nothing, or the whole block, as DFlash is published and
    measured. None for a method whose budgets are chosen by what rounds cost."""
    if method in ("ddtree", "draft-model"):
        return None
    return drafter.longest_draft if method != "ar" and drafter.at_once else 0


def candidates(method: str, budget: int, stochastic: bool) -> int:
    """K: how many candidates per position the method asks the drafter for."""
    if method == "ddtree":
        return budget
    return SAMPLED_CANDIDATES if stochastic and method in ("dflash-sample", "draft-model") else 1


def propose(method: str, draft: Draft, budget: int, sampler: Sampler) -> Proposal:
    """Turn the drafter's output into a tree of at most `budget` nodes. Raises EngineError when it is no such output."""
    if method == "ddtree":
        try:
            return Proposal(build_tree(draft.log_probs, draft.token_ids, budget))
        except ValueError as error:
            raise EngineError(f"the drafter's output cannot be used: {error}") from error
    if method == "dflash":
        return Proposal(chain(draft.token_ids[:budget, 0], draft.log_probs[:budget, 0]))
    drawn = draft.drawn
    if drawn is None:
        rows = zip(draft.log_probs[:budget], draft.token_ids[:budget], strict=True)
        drawn = tuple(sampler.draft(*row, depth) for depth, row in enumerate(rows))
    return Proposal(chain([d.token for d in drawn]), drawn if sampler.params.stochastic else ())
