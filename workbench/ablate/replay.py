"""The rounds that any way of making trees would have had over known texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.candidates import Candidates
from ddtree_trt.runtime.tree import DraftTree
from workbench.ablate.trees import BEAM, HEAP, POLICIES, without_conditions
from workbench.drafts import Text


@dataclass(frozen=True)
class TreeRow:
    """One way of making trees, replayed over all texts."""

    policy: str
    nodes: int  # most nodes
    depth: int  # most tokens of a path
    width: int | None  # the best one, where several are tried
    tau: float  # tokens per round, mean over texts
    expected: float  # tokens per round that the drafter's probabilities promise
    histogram: dict[int, int]  # rounds by the tokens they committed
    candidates: str = "as drafted"  # or its marginals, where the drafter states conditionals


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


def replay(texts: Sequence[Text], grow: Callable[[Candidates], DraftTree]) -> Rounds:
    """The rounds that decoding these texts takes with such trees."""
    lengths, expected = [], list[float]()
    for text in texts:
        place, found = 0, list[int]()
        while place < len(text.drafts):
            tree = grow(text.drafts[place])
            found.append(len(text.path(place, tree)))
            expected.append(1 + float(np.exp(tree.log_weights).sum()))
            place += found[-1]
        if found:
            lengths.append(tuple(found))
    return Rounds(tuple(lengths), float(np.mean(expected)))


@dataclass(frozen=True)
class Questions:
    """What replays answer."""

    texts: Sequence[Text]
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
        texts = []
        for text in self.texts:
            stated = [plain for draft in text.drafts if (plain := without_conditions(draft)) is not None]
            if len(stated) < len(text.drafts):
                return []
            texts.append(Text(text.tokens, stated))
        asked = product((("marginals", replace(self, texts=texts)), ("conditionals", self)), self.budgets)
        return [replace(each._row(HEAP, n, self.length, kind), candidates=kind) for (kind, each), n in asked]

    def _row(self, policy: str, nodes: int, depth: int, stage: str) -> TreeRow:
        self.progress(f"replay {stage}", self.budgets.index(nodes), len(self.budgets))
        grow = partial(POLICIES[policy], nodes=nodes, depth=depth)
        tried: dict[int | None, Rounds] = {None: replay(self.texts, grow)}
        if policy == BEAM:
            widths = [1 << i for i in range(nodes.bit_length())]
            tried = {width: replay(self.texts, partial(grow, width=width)) for width in widths}
        width, best = max(tried.items(), key=lambda each: each[1].tau)
        return TreeRow(policy, nodes, depth, width, best.tau, best.expected, best.histogram)
