"""Scheduling of rounds on the device: launched ahead of the host, read one by one.

A slot joins with the host's counts (committed rows of the caches, states that wait for the drafter), which go up with
the launch, and leaves by not being in the next one. Meanwhile these counts are those of the latest round that was read:
launched rounds write only behind the committed rows, so that nothing has to be undone when a slot leaves.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.buffers import RoundShapes
from ddtree_trt.runtime.engines.base import FinishedRound, RoundRequest, RoundResult
from ddtree_trt.runtime.engines.drafters import check_up_to_date
from ddtree_trt.runtime.engines.torch import device_round as columns
from ddtree_trt.runtime.engines.torch.device_round import BlockOnDevice, Columns, RoundPasses
from ddtree_trt.runtime.engines.torch.target import TargetPass
from ddtree_trt.runtime.tree import EMPTY, DraftTree


@dataclass(eq=False)
class _Member:
    """A slot that takes part in rounds."""

    waiting: int  # most states that wait for the drafter behind the rounds launched
    launched: int = 0  # rounds that were not read
    absorbing: int = 0  # of them, those that take in what waits


class _Entry:
    """Memory of the host for one pass: what goes up, what comes down, and the times of its parts."""

    def __init__(self, slots: int, results: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.told = Columns(slots, torch.device("cpu"), pinned=self._on_gpu)
        self.ints = self.told.ints.numpy()
        self.temperatures, self.seeds = self.told.temperatures.numpy(), self.told.seeds.numpy()
        self._results = torch.zeros(results, dtype=torch.int32, pin_memory=self._on_gpu)
        self._marks: list[Any] = [torch.cuda.Event(enable_timing=True) if self._on_gpu else 0.0 for _ in range(3)]

    def mark(self, place: int) -> None:
        if self._on_gpu:
            self._marks[place].record()
        else:
            self._marks[place] = time.perf_counter()

    def download(self, results: torch.Tensor) -> None:
        self._results[: len(results)].copy_(results, non_blocking=True)

    def wait(self, count: int, width: int) -> NDArray[np.int32]:
        """The results [N, width], when they are there; the entry's next use overwrites them."""
        if self._on_gpu:
            self._marks[-1].synchronize()
        found: NDArray[np.int32] = self._results[: count * width].numpy().reshape(count, width)
        return found

    def seconds(self, start: int, end: int) -> float:
        if self._on_gpu:
            return float(self._marks[start].elapsed_time(self._marks[end])) / 1e3
        return float(self._marks[end] - self._marks[start])


@dataclass(frozen=True)
class _Pass:
    """A pass over some of a round's slots, launched and not read."""

    requests: list[RoundRequest]
    members: list[_Member]
    absorbing: int  # the first so many take in what waits
    tokens: int  # T
    entry: _Entry


class TorchRounds:
    """`base.DeviceRounds` of the PyTorch engine."""

    def __init__(self, target: TargetPass, drafter: BlockOnDevice, shapes: RoundShapes) -> None:
        self.by_default = target.device.type == "cuda"
        self._target, self._drafter, self.shapes = target, drafter, shapes
        self._passes = RoundPasses(target, drafter, shapes)
        self._members: dict[int, _Member] = {}
        target.cache.busy = drafter.cache.busy = self._members
        self._launched: deque[list[_Pass]] = deque()
        self._entries: list[_Entry] = []  # that are free
        self._slack = max(shapes.tokens[-1], drafter.dims.block_size, 1 + shapes.longest_draft)

    @property
    def ahead(self) -> int:
        return len(self._launched)

    def launchable(self, slots: Sequence[int]) -> list[int]:
        lengths, longest = self._target.cache.lengths, 1 + self.shapes.longest_draft
        most, members, found = self._target.cache.rows - self._slack, self._members, []
        for slot in slots:
            under_way = members[slot].launched if slot in members else 0
            found.append(under_way if not under_way or lengths[slot] + under_way * longest <= most else -1)
        return found

    def launch(self, requests: Sequence[RoundRequest]) -> None:
        launched: list[_Pass] = []
        self._launched.append(launched)
        for r in requests:
            if r.slot not in self._members:
                self._join(r)
        members, buffer = self._members, 1 + self.shapes.longest_draft
        absorbs = {r.slot: r.budget > 0 or (r.taps and members[r.slot].waiting >= buffer) for r in requests}
        # Slots with the largest trees share passes, and those whose drafter works are the first of theirs.
        left = sorted(requests, key=lambda r: (-r.budget, not absorbs[r.slot]))
        while left:
            tokens = next((t for t in self.shapes.tokens if t > left[0].budget), self.shapes.tokens[-1])
            count = min(len(left), self.shapes.most_slots(tokens))
            size = next(n for n in self.shapes.slots if n >= count)
            spare = self._target.cache.spare((), self._slack)[: size - count] if size > count else []
            if count + len(spare) < size:
                count, spare = max(n for n in self.shapes.slots if n <= count), []
            group, left = left[:count], left[count:]
            launched.append(self._launch(group, absorbs, [*(r.slot for r in group), *spare], tokens))

    def read(self) -> FinishedRound:
        results: list[RoundResult] = []
        draft_s = rest_s = 0.0
        for each in self._launched.popleft():
            entry, longest, width = each.entry, self._passes.longest(each.tokens), self._passes.width(each.tokens)
            values = entry.wait(len(each.requests), width)
            heads = values[:, : 2 + longest].tolist()
            for place, (request, member, head) in enumerate(zip(each.requests, each.members, heads, strict=True)):
                slot, absorbed = request.slot, place < each.absorbing
                member.launched -= 1
                member.absorbing -= absorbed
                if self._members.get(slot) is not member:
                    continue
                count, length, *tokens = head
                self._target.cache.append(slot, length)
                self._drafter.advance(slot, length if request.taps else 0, absorbed=absorbed)
                seen = self._drafted(values[place], count, length, each.tokens) if request.looks else None
                results.append(RoundResult(request, tokens[:length], count - 1, seen))
            draft_s += entry.seconds(0, 1)
            rest_s += entry.seconds(1, 2)
            self._entries.append(entry)
        return FinishedRound(results, draft_s, rest_s)

    def leave(self, slot: int) -> None:
        member = self._members.pop(slot, None)
        if member is not None and member.absorbing:  # the states that wait are in the drafter's cache by then
            self._drafter.advance(slot, 0, absorbed=True)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Capture the graphs of all passes. Every slot must be empty."""
        verifications, drafts = self.shapes.verifications(), self.shapes.drafts()
        ints = self._passes.columns.ints
        ints.zero_()
        ints[columns.SLOT].copy_(torch.arange(ints.shape[1]).clamp(max=self._target.cache.slots - 1))
        ints[columns.ENTERS], ints[columns.ENTERS_DRAFT] = 1, 1
        works: list[tuple[str, Any, tuple[int, ...]]] = [("round", self._passes.verify, each) for each in verifications]
        works = [("round draft", self._passes.draft, each) for each in drafts] + works
        for done, (name, work, shape) in enumerate(reversed(works), 1):
            self._target.graphs.run((name, *shape), partial(work, *shape))
            progress("capturing rounds", done, len(works))

    def _join(self, request: RoundRequest) -> None:
        slot, cache = request.slot, self._target.cache
        if request.taps:
            check_up_to_date(self._drafter, cache, slot)
        cache.check_room(slot, self._slack)
        self._members[slot] = _Member(self._drafter.counts[slot])

    def _launch(self, requests: list[RoundRequest], absorbs: dict[int, bool], slots: list[int], tokens: int) -> _Pass:
        """Put a pass on the stream: over the requests' slots, and others that pad it."""
        free, passes = self._entries, self._passes
        entry = free.pop() if free else _Entry(self._target.cache.slots, len(passes.results), self._target.device)
        members = [self._members[r.slot] for r in requests]
        absorbing, size = sum(absorbs[r.slot] for r in requests), len(slots)
        self._tell(entry, requests, members, slots, absorbing)
        entry.mark(0)
        self._passes.columns.memory.copy_(entry.told.memory, non_blocking=True)
        graphs = self._target.graphs
        if absorbing:
            reach = self.shapes.reach(max(2 * r.budget if r.looks else r.budget for r in requests))
            first = next(n for n in self.shapes.slots if n >= absorbing)
            drafted = (first, reach, self.shapes.candidates(tokens) if reach else 1)
            graphs.run(("round draft", *drafted), partial(self._passes.draft, *drafted))
        entry.mark(1)
        graphs.run(("round", size, tokens), partial(self._passes.verify, size, tokens))
        entry.download(self._passes.results[: len(requests) * self._passes.width(tokens)])
        entry.mark(2)
        for place, (request, member) in enumerate(zip(requests, members, strict=True)):
            member.launched += 1
            if place < absorbing:
                member.absorbing += 1
                member.waiting = 0
            if request.taps:
                member.waiting += self._passes.longest(tokens) if request.budget else 1
        return _Pass(requests, members, absorbing, tokens, entry)

    def _tell(
        self, entry: _Entry, requests: list[RoundRequest], members: list[_Member], slots: list[int], absorbing: int
    ) -> None:
        target, drafter, ints = self._target.cache.lengths, self._drafter, entry.ints
        count, size = len(requests), len(slots)
        new = np.array([not m.launched for m in members] + [True] * (size - count))
        ints[columns.SLOT, :size] = slots
        ints[columns.ENTERS_DRAFT, :size] = ints[columns.ENTERS, :size] = new
        ints[columns.ENTERS, :absorbing] = 0  # the draft has taken it in
        if new.any():
            ints[columns.PAST, :size] = [target[s] for s in slots]
            ints[columns.CONTEXT, :size] = [drafter.cache.lengths[s] for s in slots]
            ints[columns.WAITING, :size] = [drafter.counts[s] for s in slots]
            ints[columns.BONUS, :count] = [r.bonus_token for r in requests]
        for column, name in ((columns.BUDGET, "budget"), (columns.HOLDS, "taps"), (columns.CHAIN, "chain")):
            ints[column, :count] = [getattr(r, name) for r in requests]
            ints[column, count:size] = 0
        ints[columns.ACTIVE, :size] = np.arange(size) < count
        ints[columns.ABSORBS, :size] = np.arange(size) < absorbing
        entry.temperatures[:count] = [r.temperature for r in requests]
        entry.temperatures[count:size] = 0.0
        entry.seeds[:count] = [r.seed for r in requests]

    def _drafted(
        self, row: NDArray[np.int32], count: int, length: int, tokens: int
    ) -> tuple[DraftTree, DraftTree, NDArray[np.int32]] | None:
        """What a `RoundResult` says was drafted, from a slot's results [width]."""
        if count == 1:
            return None
        longest, outlook = self._passes.longest(tokens), self.shapes.outlook(tokens)
        sizes = 2 + longest, longest, tokens, tokens, outlook, outlook
        _, path, token_ids, parents, weights, depths = np.split(row.copy(), np.cumsum(sizes[:-1]))
        log_weights = weights.view(np.float32).astype(np.float64)
        seen, nodes = int(np.count_nonzero(depths)), count - 1
        tree = DraftTree(token_ids[1:count], depths[:nodes], parents[:count], log_weights[:nodes])
        more = DraftTree(EMPTY.token_ids, depths[:seen], EMPTY.parents, log_weights[:seen])
        return tree, more, path[:length]
