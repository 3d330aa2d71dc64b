"""Device rounds as an engine offers them: launched ahead of the host, read one by one.

While the host looks at one round's tokens, the device does the next. The engine's books (lengths of its caches, states
that wait for the drafter) are true after every round that was read: rounds still in flight wrote only behind the rows
that count. So nothing has to be undone when a flight ends: whatever else happens to one of its slots, or another set of
slots, starts from the books, and rounds launched in vain are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ddtree_trt.plugins import MAX_DEVICE_BUDGET
from ddtree_trt.runtime.engines.base import RoundRequest, RoundResult
from ddtree_trt.runtime.engines.drafters import check_up_to_date
from ddtree_trt.runtime.engines.torch.device_round import DeviceRound
from ddtree_trt.runtime.engines.torch.drafters import BlockDrafter

if TYPE_CHECKING:
    from ddtree_trt.runtime.engines.torch.engine import TorchEngine

AHEAD = 2  # rounds in flight: the host reads one while the device does the next


class TorchRounds:
    """`engine.DeviceRounds` of the PyTorch engine."""

    make_round = DeviceRound

    def __init__(self, engine: TorchEngine, drafter: BlockDrafter) -> None:
        self.by_default = engine.device.type == "cuda"
        engine.flights.append(self)
        self._engine, self._drafter = engine, drafter
        self._graphs = engine.graphs.sharing()
        self._made: dict[tuple[object, ...], DeviceRound] = {}
        # The flight: what the next call must ask for to go on with it, and the end of each round under way.
        self._flying: DeviceRound | None = None
        self._expected: list[RoundRequest] = []
        self._marks: deque[torch.cuda.Event | None] = deque()
        self._read = 0

    def round(self, requests: Sequence[RoundRequest]) -> list[RoundResult]:
        """See `engine.DeviceRounds`. Raises EngineError for a slot without room for a round."""
        asked = list(requests)
        flying = self._flying if asked == self._expected else None
        if flying is None:
            flying = self._take_off(asked)
        self._launch(flying, asked)
        _wait(self._marks.popleft())
        results = flying.read(self._read)
        self._read += 1
        self._keep_books(asked, results)
        self._expected = [replace(r, bonus_token=f.tokens[-1]) for r, f in zip(asked, results, strict=True)]
        return results

    def made_for(self, requests: Sequence[RoundRequest]) -> DeviceRound:
        """The round that serves these requests; it is made once for every number of slots and bucket of tree tokens."""
        batch = len(requests)
        tokens = self._engine.bucket(1 + max(r.budget for r in requests))
        tokens = min(tokens, 1 + MAX_DEVICE_BUDGET)
        sampled = any(r.temperature > 0 for r in requests)
        key = (batch, tokens, sampled)
        if key not in self._made:
            self._made[key] = self.make_round(self._engine, self._drafter, batch, tokens, self._graphs, sampled=sampled)
        return self._made[key]

    def leave(self, slot: int) -> None:
        """The engine is about to do something else with a slot: a flight that has it ends."""
        if any(r.slot == slot for r in self._expected):
            self._land()

    def close(self) -> None:
        self._land()
        self._flying = None
        self._made.clear()
        self._graphs.clear()
        if self in self._engine.flights:
            self._engine.flights.remove(self)

    def _land(self) -> None:
        self._expected = []
        self._marks.clear()

    def _take_off(self, requests: list[RoundRequest]) -> DeviceRound:
        self._engine.leave(*(r.slot for r in requests))
        self._land()
        for r in requests:
            check_up_to_date(self._drafter, self._engine.cache, r.slot)
        self._flying, self._read = self.made_for(requests), 0
        self._flying.start(requests)
        return self._flying

    def _launch(self, flying: DeviceRound, requests: list[RoundRequest]) -> None:
        """Put rounds on the stream as far ahead as there is room, the longest paths assumed."""
        cache = self._engine.cache
        if not self._marks:
            for r in requests:
                cache.check_room(r.slot, flying.rows)
        longest = max(cache.lengths[r.slot] for r in requests)
        while len(self._marks) < AHEAD and longest + len(self._marks) * flying.longest + flying.rows <= cache.rows:
            flying.step()
            self._marks.append(self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what is on the stream now; on a CPU nothing is ever under way."""
        if self._engine.device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _keep_books(self, requests: list[RoundRequest], results: list[RoundResult]) -> None:
        """Count what was committed. A round in flight takes in the states of the one just read, and overwrites them
        where they waited."""
        cache, drafter = self._engine.cache, self._drafter
        for request, result in zip(requests, results, strict=True):
            slot = request.slot
            cache.append(slot, len(result.tokens))
            waiting = 0 if self._marks else len(result.tokens)
            drafter.cache.lengths[slot], drafter.counts[slot] = cache.lengths[slot] - waiting, waiting


def _wait(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        mark.synchronize()
