"""Rounds on the device as the engine offers them: launched ahead of the host, read one by one.

While the host looks at one round's tokens, the device does the next. What the host counts (committed rows of the
caches, states that wait for the drafter) is right after every round that was read: rounds still under way write only
behind the rows that count. So nothing has to be undone when other work claims one of their slots, or another set of
slots is asked for: that begins from the host's counts, and rounds launched in vain are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ddtree_trt.plugins import MAX_DEVICE_BUDGET
from ddtree_trt.runtime.engines.base import RoundRequest, RoundResult
from ddtree_trt.runtime.engines.drafters import check_up_to_date
from ddtree_trt.runtime.engines.torch.device_round import DeviceRound
from ddtree_trt.runtime.engines.torch.drafters import BlockDrafter
from ddtree_trt.runtime.engines.torch.target import TargetPass

AHEAD = 2  # rounds under way: the host reads one while the device does the next


@dataclass
class _Flight:
    """Rounds of one set of slots that follow each other on the device."""

    round: DeviceRound
    claim: int  # of its slots
    expected: list[RoundRequest] = field(default_factory=list)  # what a call must ask for to get the next of them
    ends: deque[torch.cuda.Event | None] = field(default_factory=deque)  # of the rounds under way
    read: int = 0  # rounds the host has read


class TorchRounds:
    """`base.DeviceRounds` of the PyTorch engine."""

    def __init__(
        self, target: TargetPass, drafter: BlockDrafter, make_round: Callable[..., DeviceRound] = DeviceRound
    ) -> None:
        """`make_round` takes the arguments of `DeviceRound`."""
        self.by_default = target.device.type == "cuda"
        self._target = target
        self._drafter = drafter
        self._make_round = make_round
        self._graphs = target.graphs.sharing()
        self._made: dict[tuple[int, int, bool], DeviceRound] = {}
        self._flight: _Flight | None = None

    def round(self, requests: Sequence[RoundRequest]) -> list[RoundResult]:
        """See `base.DeviceRounds`. Raises EngineError for a slot without room for a round."""
        asked = list(requests)
        flight = self._flight
        if flight is None or not self._continues(flight, asked):
            self._flight = None  # a start that fails leaves tensors that it wrote in part
            flight = self._flight = self._start(asked)
        self._launch_ahead(flight, asked)
        _wait(flight.ends.popleft())
        results = flight.round.read(flight.read)
        flight.read += 1
        self._count(asked, results, next_is_launched=bool(flight.ends))
        flight.expected = [replace(r, bonus_token=f.tokens[-1]) for r, f in zip(asked, results, strict=True)]
        return results

    def made_for(self, requests: Sequence[RoundRequest]) -> DeviceRound:
        """The round that serves these requests; it is made once for every number of slots and bucket of tree tokens."""
        batch = len(requests)
        tokens = self._target.bucket(1 + max(r.budget for r in requests))
        tokens = min(tokens, 1 + MAX_DEVICE_BUDGET)
        sampled = any(r.temperature > 0 for r in requests)
        key = (batch, tokens, sampled)
        if key not in self._made:
            self._made[key] = self._make_round(
                self._target, self._drafter, self._graphs, batch, tokens, sampled=sampled
            )
        return self._made[key]

    def close(self) -> None:
        """Forget rounds and graphs; those under way must be done."""
        self._flight = None
        self._made.clear()
        self._graphs.clear()

    def _continues(self, flight: _Flight, asked: list[RoundRequest]) -> bool:
        """Whether the flight's next round is the one asked for, and nothing else has worked on its slots."""
        return asked == flight.expected and self._target.claims.holds(flight.claim, (r.slot for r in asked))

    def _start(self, requests: list[RoundRequest]) -> _Flight:
        claim = self._target.claims.take(r.slot for r in requests)
        for r in requests:
            check_up_to_date(self._drafter, self._target.cache, r.slot)
        device_round = self.made_for(requests)
        device_round.start(requests)
        return _Flight(device_round, claim)

    def _launch_ahead(self, flight: _Flight, requests: list[RoundRequest]) -> None:
        """Put rounds on the stream as far ahead as there is room, the longest paths assumed."""
        cache, ends, launched = self._target.cache, flight.ends, flight.round
        if not ends:
            for r in requests:
                cache.check_room(r.slot, launched.rows)
        longest = max(cache.lengths[r.slot] for r in requests)
        while len(ends) < AHEAD and longest + len(ends) * launched.longest + launched.rows <= cache.rows:
            launched.step()
            ends.append(self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what is on the stream now; on a CPU nothing is ever under way."""
        if self._target.device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _count(self, requests: list[RoundRequest], results: list[RoundResult], *, next_is_launched: bool) -> None:
        """Count what a round committed. The next one, where it is launched, takes in the states this one left for the
        drafter, and overwrites them where they waited."""
        for request, result in zip(requests, results, strict=True):
            size = len(result.tokens)
            self._target.cache.append(request.slot, size)
            self._drafter.advance(request.slot, size, waiting=0 if next_is_launched else size)


def _wait(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        mark.synchronize()
