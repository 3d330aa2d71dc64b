"""Forced acceptance: an engine whose verification accepts a given number of tokens, whatever the target says.

For performance runs of random weights, where no draft would ever be accepted. Drafting, verification and commit do all
their work on the real engine; only the target's choices are replaced before the walk, so that the text means nothing.
`BenchSettings.forced_acceptance` is the only way to it, and every table of such a run says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.engines.base import (
    DeviceRounds,
    Draft,
    DraftRequest,
    Engine,
    LogitRows,
    Verdict,
    VerifyRequest,
)
from ddtree_trt.runtime.tree import TokenTree


def forced_path(parents: Sequence[int], depths: Sequence[int], accepted: int) -> list[int]:
    """The path [m], root first, to the first node at depth `accepted`, or at the tree's depth if that is less."""
    node = list(depths).index(min(accepted, max(depths)))
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def unmatched_token(children: set[int], choice: int, banned: frozenset[int]) -> int:
    """A token that ends the walk: the target's own choice, or the first token that no child has and is not banned."""
    return next(t for t in itertools.chain((choice,), itertools.count()) if t not in children and t not in banned)


class ForcedEngine:
    """An engine that commits `acceptance_length` tokens a round, bonus included, as far as the tree is deep enough.

    It replaces `Verdict.choices`, which greedy decoding takes; sampling reads logits and is not affected.
    """

    foresee = None

    def __init__(self, engine: Engine, acceptance_length: int, banned: frozenset[int] = frozenset()) -> None:
        self.manifest: Manifest = engine.manifest
        self.threads = engine.threads
        self.buckets = engine.buckets
        self.batches = engine.batches
        self._engine = engine
        self._accepted = acceptance_length - 1
        self._banned = banned
        self.rounds: DeviceRounds | None = None
        if engine.rounds is not None:
            self.rounds = _forced_rounds(engine, acceptance_length)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = self._engine.verify(requests)
        return [Verdict(self._choices(r.tree, v.choices), v.logits) for r, v in zip(requests, verdicts, strict=True)]

    def _choices(self, tree: TokenTree, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        path = forced_path(tree.parents.tolist(), tree.depths.tolist(), self._accepted)
        forced = choices.copy()
        forced[path[:-1]] = tree.token_ids[path[1:]]
        children = set(tree.token_ids[tree.parents == path[-1]].tolist())
        forced[path[-1]] = unmatched_token(children, int(choices[path[-1]]), self._banned)
        return forced

    def length(self, slot: int) -> int:
        return self._engine.length(slot)

    def draftable_length(self, slot: int) -> int:
        return self._engine.draftable_length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._engine.truncate(slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        return self._engine.prefill(slot, token_ids, rows=rows, taps=taps)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self._engine.draft(requests)

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        self._engine.commit(slot, path, taps=taps)

    def warm_up(self, progress: Progress = no_progress) -> None:
        self._engine.warm_up(progress)

    def settle(self) -> None:
        self._engine.settle()

    def close(self) -> None:
        try:
            self._engine.close()
        finally:
            self.rounds = None  # they would keep the engine's memory


def _forced_rounds(engine: Engine, acceptance_length: int) -> DeviceRounds:
    # Only the PyTorch backend has device rounds, so it is installed.
    from ddtree_trt.bench.pairs.forced_torch import ForcedRounds
    from ddtree_trt.runtime.engines.torch.engine import TorchEngine

    assert isinstance(engine, TorchEngine)
    return ForcedRounds(engine, acceptance_length)
