"""How many draft nodes a round verifies.

`auto` follows the rule of CaDDTree (arXiv 2606.01813): of the heap's pop order take the prefix of n nodes that
maximises expected tokens per second, (1 + Σ q̂) / (C_draft + C_verify(n, context)), with the costs of the engine's
latency profile and q̂ calibrated online. Whether to draft at all is decided before the drafter runs, from what recent
drafting rounds brought: with a drafter that does not pay, decoding falls back to single tokens and only probes now and
then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.calibration import Calibration
from ddtree_trt.runtime.profile import LatencyProfile
from ddtree_trt.runtime.tree import DraftTree


@dataclass(frozen=True)
class Decision:
    """Why a round had the budget it had."""

    nodes: int
    expected_tokens: float  # 1 + Σ q̂ over the chosen nodes
    expected_s: float  # C_draft + C_verify
    single_token_s: float  # what a round without drafting costs
    drafted: bool = True
    probe: bool = False  # drafted only to see whether drafting pays again

    @property
    def expected_gain(self) -> float:
        """Expected tokens per second over those without drafting."""
        return self.expected_tokens * self.single_token_s / self.expected_s


class Budget(Protocol):
    """Chooses the tree size of every round of one sequence."""

    last: Decision | None  # of the latest round; None where nothing was decided

    def ceiling(self, past: int) -> int:
        """Most nodes worth drafting for at `past` committed tokens; 0 skips the drafter this round."""

    def choose(self, tree: DraftTree, past: int) -> int:
        """How many nodes of the tree, in pop order, to verify."""

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        """Learn from a verified tree and the accepted path [m], root first."""


class FixedBudget:
    """The same budget every round."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.last: Decision | None = None

    def ceiling(self, past: int) -> int:
        return self.nodes

    def choose(self, tree: DraftTree, past: int) -> int:
        return self.nodes

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        pass


@dataclass(frozen=True)
class Costs:
    """What rounds cost at one context length, in seconds."""

    draft_s: float
    verify_s: NDArray[np.float64]  # of 0 … max_nodes draft nodes
    single_s: float  # a round without drafting


class CostModel:
    """The latency profile, interpolated over the measured contexts."""

    STEP = 64  # tokens of context over which costs are taken as constant

    def __init__(self, profile: LatencyProfile, max_nodes: int) -> None:
        self._contexts = np.array([c.context for c in profile.contexts], float)
        self._draft = np.array([c.draft_s for c in profile.contexts])
        self._verify = np.stack([c.verify_curve(max_nodes) for c in profile.contexts])
        self._known: dict[int, Costs] = {}

    def at(self, past: int) -> Costs:
        """Costs at `past` committed tokens."""
        step = past // self.STEP
        if step not in self._known:
            self._known[step] = self._interpolate((step + 0.5) * self.STEP)
        return self._known[step]

    def _interpolate(self, past: float) -> Costs:
        draft = float(np.interp(past, self._contexts, self._draft))
        place = float(np.interp(past, self._contexts, np.arange(len(self._contexts))))
        low, share = int(place), place - int(place)
        high = min(low + 1, len(self._contexts) - 1)
        verify = (1 - share) * self._verify[low] + share * self._verify[high]
        return Costs(draft, verify, float(verify[0]))


class Experience:
    """What drafting rounds have brought lately: rounds, tokens and seconds with exponential forgetting."""

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self.rounds = self.tokens = self.seconds = 0.0

    def add(self, tokens: float, seconds: float, rounds: float = 1.0) -> None:
        self.rounds = self.rounds * self._keep + rounds
        self.tokens = self.tokens * self._keep + tokens
        self.seconds = self.seconds * self._keep + seconds

    def excerpt(self, rounds: float, memory: float) -> Experience:
        """The same averages with the weight of at most `rounds` rounds."""
        part = Experience(memory)
        if self.rounds:
            share = min(1.0, rounds / self.rounds)
            part.add(self.tokens * share, self.seconds * share, self.rounds * share)
        return part


class AutoBudgets:
    """What the sequences of one engine share: its costs, and what all of them have learnt about the drafter."""

    REQUEST_MEMORY, ENGINE_MEMORY = 48.0, 512.0  # rounds
    REQUEST_PRIOR, ENGINE_PRIOR = 8.0, 4.0  # pseudo-observations per depth
    HEADSTART = 3.0  # rounds a new request starts with: of the engine's experience, or of the drafter's own promise
    FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # rounds without drafting between probes

    def __init__(self, profile: LatencyProfile, max_nodes: int, max_depth: int) -> None:
        self.costs = CostModel(profile, max_nodes)
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.calibration = Calibration(max_depth, prior=self.ENGINE_PRIOR, memory=self.ENGINE_MEMORY)
        self.experience = Experience(self.ENGINE_MEMORY)
        self.pause = self.FIRST_PAUSE  # shared, so that a useless drafter is not probed anew by every request

    def for_sequence(self) -> AutoBudget:
        return AutoBudget(self)


class AutoBudget:
    """The best budget of each round, by expected tokens per second."""

    def __init__(self, shared: AutoBudgets) -> None:
        self._shared = shared
        self._calibration = Calibration(
            shared.max_depth,
            prior=shared.REQUEST_PRIOR,
            memory=shared.REQUEST_MEMORY,
            parent=shared.calibration,
        )
        self._experience = shared.experience.excerpt(shared.HEADSTART, shared.REQUEST_MEMORY)
        self._waited = 0
        self._probing = False
        self._largest = 16
        self.last: Decision | None = None

    def ceiling(self, past: int) -> int:
        single_s = self._shared.costs.at(past).single_s
        if not self._pays(single_s):
            self._waited += 1
            if self._waited <= self._shared.pause:
                self.last = Decision(0, 1.0, single_s, single_s, drafted=False)
                return 0
            self._waited, self._probing = 0, True
        return min(self._largest * 3 // 2, self._shared.max_nodes)

    def _pays(self, single_s: float) -> bool:
        """Whether recent drafting rounds made more tokens per second than single-token rounds would."""
        seen = self._experience
        return not seen.rounds or seen.tokens * single_s >= seen.seconds

    def choose(self, tree: DraftTree, past: int) -> int:
        costs = self._shared.costs.at(past)
        ratios = self._calibration.ratios()
        n, expected = _native.best_prefix(tree.log_weights, tree.depths, ratios, costs.draft_s, costs.verify_s)
        if self._probing:
            n = max(n, min(len(tree), self._shared.max_depth))  # evidence needs nodes to accept
        self._largest = max(n, self._largest * 3 // 4, 8)
        cost = costs.draft_s + float(costs.verify_s[n])
        if not self._experience.rounds:
            rounds = self._shared.HEADSTART
            self._experience.add(rounds * expected, rounds * cost, rounds)
        self.last = Decision(n, expected, cost, costs.single_s, probe=self._probing)
        return n

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        if self.last is None or not self.last.drafted:
            return
        self._calibration.observe(tree, path)
        for experience in (self._experience, self._shared.experience):
            experience.add(len(path), self.last.expected_s)
        if self._pays(self.last.single_token_s):
            self._shared.pause = self._shared.FIRST_PAUSE
        elif self._probing:
            self._shared.pause = min(2 * self._shared.pause, self._shared.LONGEST_PAUSE)
        self._probing = False
