"""Scheduling of rounds on the device: launched ahead of the host, read one by one.

While the host processes one round's tokens, the device runs the next. The host's counts (committed rows of the caches,
states that wait for the drafter) are those of the latest round that was read: launched rounds write only behind the
committed rows. So nothing has to be undone when other work claims one of their slots, or another set of slots is
requested: that starts from the host's counts, and the rounds launched in vain are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ddtree_trt.plugins import MAX_DEVICE_BUDGET
from ddtree_trt.runtime.engines.base import RoundRequest, RoundResult
from ddtree_trt.runtime.engines.drafters import check_up_to_date
from ddtree_trt.runtime.engines.torch.device_round import BlockOnDevice, DeviceRound
from ddtree_trt.runtime.engines.torch.target import TargetPass

AHEAD = 2  # launched rounds: the host reads one while the device runs the next


@dataclass
class _Series:
    """Successive rounds of one set of slots on the device."""

    round: DeviceRound
    claim: int  # number of the claim of its slots
    expected: list[RoundRequest] = field(default_factory=list)  # the requests of a call that continues the series
    ends: deque[Callable[[], None]] = field(default_factory=deque)  # waits for launched rounds that were not read yet
    read: int = 0  # rounds the host has read


class TorchRounds:
    """`base.DeviceRounds` of the PyTorch engine."""

    def __init__(self, target: TargetPass, drafter: BlockOnDevice) -> None:
        self.by_default = target.device.type == "cuda"
        self._target = target
        self._drafter = drafter
        self._made: dict[tuple[int, int, bool], DeviceRound] = {}
        self._series: _Series | None = None

    def round(self, requests: Sequence[RoundRequest]) -> list[RoundResult]:
        """See `base.DeviceRounds`. Raises EngineError for a slot without room for a round."""
        requests = list(requests)
        series = self._series
        if series is None or not self._continues(series, requests):
            self._series = None  # a start that fails leaves tensors that it wrote in part
            series = self._series = self._start(requests)
        self._launch_ahead(series, requests)
        series.ends.popleft()()
        results = series.round.read(series.read)
        series.read += 1
        self._count(requests, results, next_is_launched=bool(series.ends))
        series.expected = [replace(r, bonus_token=f.tokens[-1]) for r, f in zip(requests, results, strict=True)]
        return results

    def made_for(self, requests: Sequence[RoundRequest]) -> DeviceRound:
        """The `DeviceRound` for these requests; one is made for every number of slots and bucket of tree tokens."""
        batch = len(requests)
        tokens = self._target.bucket(1 + max(r.budget for r in requests))
        tokens = min(tokens, 1 + MAX_DEVICE_BUDGET)
        sampled = any(r.temperature > 0 for r in requests)
        key = (batch, tokens, sampled)
        if key not in self._made:
            self._made[key] = DeviceRound(self._target, self._drafter, *key)
        return self._made[key]

    def _continues(self, series: _Series, requests: list[RoundRequest]) -> bool:
        """Whether the requests are for the series' next round, and no other call has claimed its slots."""
        return requests == series.expected and self._target.claims.holds(series.claim, (r.slot for r in requests))

    def _start(self, requests: list[RoundRequest]) -> _Series:
        claim = self._target.claims.take(r.slot for r in requests)
        for r in requests:
            check_up_to_date(self._drafter, self._target.cache, r.slot)
        device_round = self.made_for(requests)
        device_round.start(requests)
        return _Series(device_round, claim)

    def _launch_ahead(self, series: _Series, requests: list[RoundRequest]) -> None:
        """Launch up to AHEAD rounds, as far as the slots have room if every path is the longest possible."""
        cache, ends, launched = self._target.cache, series.ends, series.round
        if not ends:
            for r in requests:
                cache.check_room(r.slot, launched.rows)
        longest = max(cache.lengths[r.slot] for r in requests)
        while len(ends) < AHEAD and longest + len(ends) * launched.longest + launched.rows <= cache.rows:
            launched.step()
            ends.append(self._end_of_stream())

    def _end_of_stream(self) -> Callable[[], None]:
        """A wait for what is on the stream by now; on a CPU work is done when its call returns."""
        if self._target.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _count(self, requests: list[RoundRequest], results: list[RoundResult], *, next_is_launched: bool) -> None:
        """Count the tokens a round committed. If the next one is launched, it processes the states that this one left
        for the drafter, and overwrites them in their buffer."""
        for request, result in zip(requests, results, strict=True):
            size = len(result.tokens)
            self._target.cache.append(request.slot, size)
            self._drafter.advance(request.slot, size, waiting=0 if next_is_launched else size)
