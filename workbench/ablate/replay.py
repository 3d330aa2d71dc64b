"""Drafts behind every token of greedy texts, and the rounds that any way of making trees would have had over them.

At temperature 0 a round's draft depends on the committed text alone, and that is the same for every tree. So the rounds
of decoding with a tree follow from the text and the drafts, without a pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.candidates import Candidates
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine
from ddtree_trt.runtime.tree import DraftTree, descend
from workbench.ablate.trees import HEAP, POLICIES, Policy, without_conditions


@dataclass(frozen=True)
class KnownText:
    """A prompt, the target's tokens after it, and what is drafted behind each of them but the last."""

    token_ids: tuple[int, ...]
    start: int  # number of the prompt's tokens
    drafts: tuple[Candidates, ...]  # drafts[i] is behind token start + i


@dataclass(frozen=True)
class TreePlan:
    """A way to make the tree of a round."""

    policy: Policy
    nodes: int  # most nodes
    depth: int  # most tokens of a path
    width: int | None = None  # None: the policy's own

    def grow(self, candidates: Candidates) -> DraftTree:
        return self.policy.grow(candidates, self.nodes, self.depth, self.width)


@dataclass(frozen=True)
class TreeRow:
    """One way of making trees, replayed over all texts."""

    policy: str
    nodes: int
    depth: int
    width: int | None
    tau: float  # tokens per round, mean over texts
    expected: float  # tokens per round that the drafter's probabilities promise
    histogram: dict[int, int]  # rounds by the tokens they committed
    candidates: str = "as drafted"  # or its marginals, where the drafter states conditionals


def record(
    engine: Engine, texts: Sequence[tuple[Sequence[int], int]], top_k: int, progress: Progress = no_progress
) -> list[KnownText]:
    """The drafts of texts (token ids, number of the prompt's), with `top_k` candidates per position. Uses slot 0, and
    leaves it empty."""
    length, found = engine.manifest.drafting.longest_draft, []
    for number, (token_ids, start) in enumerate(texts):
        progress("record drafts", number, len(texts))
        engine.truncate(0, 0)
        drafts = []
        for place in range(start, len(token_ids) - 1):
            _commit(engine, token_ids, place)
            (draft,) = engine.draft([DraftRequest(0, token_ids[place], top_k, length, _draws_nothing)])
            drafts.append(draft.candidates)
        found.append(KnownText(tuple(token_ids), start, tuple(drafts)))
    engine.truncate(0, 0)
    progress("record drafts", len(texts), len(texts))
    return found


def _commit(engine: Engine, token_ids: Sequence[int], end: int) -> None:
    """Commit the tokens up to `end`."""
    chunk = engine.manifest.limits.prefill_chunk
    for begin in range(engine.length(0), end, chunk):
        piece = np.array(token_ids[begin : min(begin + chunk, end)], np.int64)
        engine.prefill(0, piece, rows="none", taps=True)


def _draws_nothing(*_: object) -> DrawnFrom:
    raise AssertionError("a drafter of trees draws nothing")


@dataclass(frozen=True)
class Rounds:
    """The rounds of one way of making trees over all texts."""

    lengths: tuple[tuple[int, ...], ...]  # per text: tokens committed per round, bonus included
    expected: float

    @property
    def tau(self) -> float:
        return float(np.mean([np.mean(lengths) for lengths in self.lengths]))

    @property
    def histogram(self) -> dict[int, int]:
        flat = [n for lengths in self.lengths for n in lengths]
        return {n: flat.count(n) for n in sorted(set(flat))}


def replay(texts: Sequence[KnownText], plan: TreePlan) -> Rounds:
    """The rounds that decoding these texts takes with such trees."""
    lengths, expected = [], list[float]()
    for text in texts:
        place, found = text.start, list[int]()
        while (left := len(text.token_ids) - 1 - place) > 0:
            tree = plan.grow(text.drafts[place - text.start])
            following = iter(text.token_ids[place + 1 :])
            found.append(min(len(descend(tree, lambda node, following=following: next(following, None))), left))  # type: ignore[misc]
            expected.append(1 + float(np.exp(tree.log_weights).sum()))
            place += found[-1]
        if found:
            lengths.append(tuple(found))
    return Rounds(tuple(lengths), float(np.mean(expected)))


@dataclass(frozen=True)
class Questions:
    """What replays answer."""

    texts: Sequence[KnownText]
    budgets: tuple[int, ...]
    depths: tuple[int, ...]
    length: int  # L, the most tokens of a path
    deepest: int  # where the depth is the question
    progress: Progress = no_progress

    def policies(self) -> list[TreeRow]:
        """Every policy at every number of nodes."""
        return [self._row(p, n, self.length, "policies") for n, p in product(self.budgets, POLICIES)]

    def by_depth(self) -> list[TreeRow]:
        """The heap at every depth and number of nodes."""
        depths = sorted({*(d for d in self.depths if d < self.deepest), self.deepest})
        return [self._row(HEAP, n, d, "depths") for n, d in product(self.budgets, depths)]

    def conditionals(self) -> list[TreeRow]:
        """The heap over both where the drafter states conditionals, and the marginals they are made of."""
        plain = [tuple(without_conditions(draft) for draft in text.drafts) for text in self.texts]
        if any(draft is None for drafts in plain for draft in drafts):
            return []
        texts = [replace(t, drafts=drafts) for t, drafts in zip(self.texts, plain, strict=True)]  # type: ignore[arg-type]
        marginals = replace(self, texts=texts)
        kinds = (("marginals", marginals), ("conditionals", self))
        return [
            replace(questions._row(HEAP, n, self.length, kind), candidates=kind)
            for kind, questions in kinds
            for n in self.budgets
        ]

    def _row(self, policy: Policy, nodes: int, depth: int, stage: str) -> TreeRow:
        self.progress(f"replay {stage}", self.budgets.index(nodes), len(self.budgets))
        tried = []
        for width in policy.widths(nodes):
            tried.append((width, replay(self.texts, TreePlan(policy, nodes, depth, width))))
        width, best = max(tried, key=lambda each: each[1].tau)
        return TreeRow(policy.name, nodes, depth, width, best.tau, best.expected, best.histogram)
