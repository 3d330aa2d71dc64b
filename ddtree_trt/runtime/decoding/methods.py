"""Methods: the ways to make a round's tree. Everything else about decoding is common to all of them.

A method is one `Method` object in the table `METHODS`. Nothing outside this module compares names of methods: what
differs between them is a field here. The command line reads the names: loading this module loads no NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ddtree_trt.drafters.kind import EXPANDED, DrafterKind, Drafts
from ddtree_trt.drafters.registry import KINDS
from ddtree_trt.errors import UsageError

if TYPE_CHECKING:
    from ddtree_trt.runtime.candidates import Candidates
    from ddtree_trt.runtime.engines.base import Draft, Draw, DrawnFrom
    from ddtree_trt.runtime.tree import DraftTree

AUTO = "auto"  # as a method: the first of METHODS that drafts with the engine's drafter
SAMPLED_CANDIDATES = 64  # K that a sampled chain draws from: any distribution q is valid, this keeps most of its mass


class Proposal(NamedTuple):
    """A tree to verify. `drawn` [n] is given for chains whose tokens were drawn at random, which the walk must accept
    by the ratio of probabilities; of other trees it accepts a node that equals the target's token."""

    tree: DraftTree
    drawn: tuple[DrawnFrom, ...] = ()


# Proposals: functions of the drafter's output, the most nodes, and the request's function that draws a token. They
# import what makes trees when they are called, and raise ValueError for an output that cannot be used.


def _nothing(draft: Draft, budget: int, draw: Draw) -> Proposal:
    from ddtree_trt.runtime.tree import EMPTY

    return Proposal(EMPTY)


def _tree(draft: Draft, budget: int, draw: Draw, width: int | None = None) -> Proposal:
    """The most probable prefixes. Of a drafter by levels they are EAGLE-2's reranked tree (arXiv 2406.16858): all its
    candidates compete, and none is more probable than the one it extends."""
    from ddtree_trt.runtime.tree import DraftTree

    return Proposal(DraftTree(*draft.candidates.best_first(budget, width=width)))


def _drawn_chain(draft: Draft, budget: int, draw: Draw) -> Proposal:
    """A chain of which each token is drawn from its candidates' probabilities given the ones drawn before it."""
    from ddtree_trt.runtime.tree import chain

    drawn = tuple(_draws(draft.candidates, budget, draw)) if draft.drawn is None else draft.drawn
    return Proposal(chain([d.token for d in drawn]), drawn)


def _draws(candidates: Candidates, budget: int, draw: Draw) -> Iterator[DrawnFrom]:
    row = 0 if candidates.token_ids.size else -1
    for depth in range(budget):
        if row < 0:
            return
        log_probs, token_ids, rows = (values[0] for values in candidates.child_log_probs([row]))
        drawn = draw(log_probs, token_ids, depth)
        yield drawn
        row = int(rows[token_ids == drawn.token][0])


@dataclass(frozen=True)
class Method:
    """A way to make the tree of a round."""

    name: str
    drafted: Drafts | None  # what a drafter must draft at a time; None: it drafts nothing, and works with every one
    propose: Callable[[Draft, int, Draw], Proposal]
    # K, the candidates per position to ask the drafter for, of the budget and of whether the request samples
    candidates: Callable[[int, bool], int] = lambda budget, stochastic: 1
    weighs_costs: bool = False  # the budget `auto` is chosen by the costs of rounds; else it is the whole draft
    branches: bool = False  # makes trees, which are measured at several budgets; else chains
    draws: bool = False  # drafted tokens are drawn at random: with a seed, output depends on the drafts
    host_reason: str | None = None  # why its rounds cannot stay on the device; None: they can

    @property
    def drafts(self) -> bool:
        """Whether it uses the drafter."""
        return self.drafted is not None

    def serves(self, drafter_kind: str) -> bool:
        """Whether it works with a drafter of that kind."""
        return not self.drafts or drafter_kind in self.drafters

    @property
    def drafters(self) -> tuple[str, ...]:
        """Kinds of drafter it can use."""
        return tuple(kind.name for kind in KINDS.values() if kind.drafts == self.drafted)

    def default_budget(self, drafter: DrafterKind) -> int | None:
        """The budget `auto` of every round: 0, or the whole block. None where it is chosen by the costs of rounds."""
        if self.weighs_costs:
            return None
        return drafter.longest_draft if self.drafts else 0


DDTREE = Method(
    name="ddtree",
    drafted="block",
    propose=_tree,
    candidates=lambda budget, stochastic: budget,
    weighs_costs=True,
    branches=True,
)
DFLASH = Method(name="dflash", drafted="block", propose=partial(_tree, width=1))
AUTOREGRESSIVE = Method(name="ar", drafted=None, propose=_nothing)
DFLASH_SAMPLE = Method(
    name="dflash-sample",
    drafted="block",
    propose=_drawn_chain,
    candidates=lambda budget, stochastic: SAMPLED_CANDIDATES if stochastic else 1,
    draws=True,
    host_reason="draws its drafts",
)
DRAFT_MODEL = Method(
    name="draft-model",
    drafted="tokens",
    propose=_drawn_chain,
    candidates=lambda budget, stochastic: SAMPLED_CANDIDATES if stochastic else 1,
    weighs_costs=True,
    draws=True,
    host_reason="draws its drafts",
)

EAGLE = Method(
    name="eagle",
    drafted="levels",
    propose=_tree,
    candidates=lambda budget, stochastic: min(budget, EXPANDED),  # as many as EAGLE's rule expands
    weighs_costs=True,
    branches=True,
    host_reason="grows its tree level by level",
)

# By name. `auto` is the first one that drafts with the engine's drafter.
METHODS = {method.name: method for method in (DDTREE, DFLASH, AUTOREGRESSIVE, DFLASH_SAMPLE, DRAFT_MODEL, EAGLE)}
BASELINES = (AUTOREGRESSIVE, DFLASH)  # methods that every other is compared with, where the drafter supports them


def resolve_method(name: str, drafter_kind: str) -> Method:
    """The method of that name, or for `auto`. Raises UsageError for one that needs another kind of drafter."""
    if name == AUTO:
        return next(method for method in METHODS.values() if drafter_kind in method.drafters)
    method = METHODS[name]
    if not method.serves(drafter_kind):
        able = dict.fromkeys(m.name for m in (*BASELINES, *METHODS.values()) if m.serves(drafter_kind))
        raise UsageError(
            f"method {name!r} needs a drafter of kind {' or '.join(method.drafters)}, this engine's is {drafter_kind}; "
            f"it can do {', '.join(able)}"
        )
    return method
