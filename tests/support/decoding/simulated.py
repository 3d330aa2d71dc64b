"""Requests decoded by automatic budgets in simulated time: costs are a profile's own, no clock is read.

A request has a quality: how often the target takes what the drafter thinks it does (`trust`), and how sure the drafter
is (`sharp`, the parameter of the Dirichlet its marginals are drawn from: the smaller, the surer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime import tree as tree_module
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudgets
from ddtree_trt.runtime.decoding.budget.base import Budget, FixedBudget
from ddtree_trt.runtime.decoding.budget.costs import CostModel
from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile
from ddtree_trt.runtime.tree import EMPTY, DraftTree, build_tree, chain

SIZES = (1, 2, 3, 5, 9, 17, 33, 65)
NODES, DEPTH, VOCAB = 64, 15, 16


def costs(draft_s: float, first: float, slope: float, draft_token_s: float = 0.0) -> LatencyProfile:
    """A single token takes 1 s, a tree of T > 1 tokens 1 + first + slope · (T − 2) s."""
    verify = (1.0, *(1 + first + slope * (t - 2) for t in SIZES[1:]))
    context = ContextCost(64, draft_s, SIZES, verify, draft_token_s)
    return LatencyProfile("fingerprint", "machine", (context,))


CPU = costs(draft_s=1.0, first=0.3, slope=0.08)  # about what the packaged pair costs: a draft takes as long as a token
SLOW_CPU = costs(draft_s=1.5, first=0.4, slope=0.12)
GPU = costs(draft_s=0.22, first=0.02, slope=0.004)
MACHINES = {"cpu": CPU, "gpu": GPU, "slow-cpu": SLOW_CPU}
CHAINS = {"small": costs(0.05, 0.1, 0.05, draft_token_s=0.12), "half": costs(0.05, 0.02, 0.005, draft_token_s=0.4)}


@dataclass(frozen=True)
class Quality:
    trust: float
    sharp: float = 0.02


GOOD = Quality(1.0)
LIAR = Quality(0.0)  # sure of itself and always wrong
UNSURE = Quality(0.3, sharp=1.0)  # knows nothing, and knows it


@dataclass(frozen=True)
class Request:
    quality: Quality
    tokens: int
    seed: int = 0


@dataclass
class Spent:
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    nodes: int = 0  # verified, where they are counted

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Text:
    """What a request's target says, and what its drafter thinks of each place: marginals over ranks, the surest first.
    A token's id is its rank; `OTHER` is none of them."""

    OTHER = VOCAB

    def __init__(self, request: Request) -> None:
        rng, quality, places = np.random.default_rng(request.seed), request.quality, request.tokens + DEPTH + 1
        marginals = np.sort(rng.dirichlet(np.full(VOCAB, quality.sharp), places))[:, ::-1]
        self._log_probs = np.log(np.maximum(marginals, 1e-12)).astype(np.float32)
        taken = rng.random(places) < quality.trust
        ranks = (rng.random((places, 1)) > np.cumsum(marginals, 1)).sum(1)
        self.tokens = np.where(taken, ranks, self.OTHER)

    def tree(self, made: int, nodes: int) -> DraftTree:
        """The drafter's best tree behind `made` tokens."""
        ids = np.tile(np.arange(VOCAB, dtype=np.int32), (DEPTH, 1))
        return build_tree(self._log_probs[made : made + DEPTH], ids, nodes)


class Decoding:
    """One request under way: the same text whatever the budgets are."""

    def __init__(self, request: Request, budget: Budget, model: CostModel, *, chains: bool = False) -> None:
        self.request, self.spent = request, Spent()
        self._text = Text(request)
        self._budget, self._model, self._chains = budget, model, chains

    @property
    def finished(self) -> bool:
        return self.spent.tokens >= self.request.tokens

    def round(self) -> None:
        made, left = self.spent.tokens, self.request.tokens - self.spent.tokens
        costs, ceiling, tree, nodes = self._model.at(made), self._budget.ceiling(made, left), EMPTY, 0
        if ceiling:
            tree = chain(np.zeros(ceiling, np.int32)) if self._chains else self._text.tree(made, ceiling)
            nodes = self._budget.choose(tree, made)
        following = self._text.tokens[made:]
        path = descend(tree.cut(nodes), iter(following.tolist()))
        path = path[:left]
        self._budget.observe(tree.cut(nodes), path, int(following[len(path) - 1]), ends=len(path) == left)
        seconds = costs.round_s(nodes) if ceiling else costs.single_s
        self.spent += Spent(seconds, len(path), 1, bool(ceiling))


def descend(tree: DraftTree, tokens: Iterator[int]) -> NDArray[np.int32]:
    """The path through a tree of a target that says the tokens."""
    return tree_module.descend(tree, lambda node: next(tokens, None))


def random_tree(rng: np.random.Generator, budget: int, depth: int = 7, sharp: float = 0.1) -> DraftTree:
    marginals = np.sort(rng.dirichlet(np.full(VOCAB, sharp), depth))[:, ::-1]
    token_ids = np.tile(np.arange(VOCAB, dtype=np.int32), (depth, 1))
    return build_tree(np.log(np.maximum(marginals, 1e-12)), token_ids, budget)


def walk_with(rng: np.random.Generator, tree: DraftTree, trust: float) -> NDArray[np.int32]:
    """A path of a target that takes each drafted child with `trust` times its marginal probability."""
    path = [0]
    weights = np.concatenate(([0.0], tree.log_weights))
    while True:
        children = np.flatnonzero(tree.parents == path[-1])
        chances = trust * np.exp(weights[children] - weights[path[-1]])
        taken = np.searchsorted(np.cumsum(chances), rng.random(), side="right")
        if taken == len(children):
            return np.array(path, np.int32)
        path.append(int(children[taken]))


class Machine:
    """An engine's worth of automatic budgets over a profile."""

    def __init__(self, profile: LatencyProfile, *, chains: bool = False, slots: int = 1) -> None:
        self.auto = AutoBudgets(profile, 16 if chains else NODES, 16 if chains else DEPTH, chains=chains)
        self._chains, self.slots = chains, slots

    def run(self, requests: Iterable[Request]) -> list[Spent]:
        """The requests one after the other, or `slots` of them side by side; what each took of the machine."""
        waiting = [Decoding(r, self.auto.for_sequence(), self.auto.costs, chains=self._chains) for r in requests]
        everyone = list(waiting)
        running: list[Decoding] = []
        while waiting or running:
            while waiting and len(running) < self.slots:
                running.append(waiting.pop(0))
            for decoding in running:
                decoding.round()
            running = [d for d in running if not d.finished]
        return [d.spent for d in everyone]

    def fixed(self, request: Request, nodes: int) -> Spent:
        """The request at a fixed budget; 0 is autoregressive decoding."""
        decoding = Decoding(request, FixedBudget(nodes), self.auto.costs, chains=self._chains)
        while not decoding.finished:
            decoding.round()
        return decoding.spent


def total(parts: Sequence[Spent]) -> Spent:
    return sum(parts, Spent())
