"""Continuous batching: assignment of slots to sequences, and the steps that advance them.

A step admits waiting sequences into free slots, prefills a chunk of their prompts, and runs one decode round over all
sequences with a complete prompt, in whose pass the chunk is where the engine can mix them: a long prompt delays running
sequences by one chunk per round. A free slot keeps its cache: a prompt that begins with its tokens starts behind them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ddtree_trt.runtime.decoding.loop import PromptChunk, decode_round, prefill
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.sequence import Sequence
from ddtree_trt.runtime.stats import StageClock


@dataclass
class _Slot:
    tokens: list[int] = field(default_factory=list)  # tokens of the cache, set when the slot becomes free
    user: Sequence | None = None
    last_used: int = 0
    reusable: bool = True  # whether the cache may serve a later prompt once the user has finished


class Scheduler:
    """Owns the engine's slots. Not thread-safe: one thread calls it."""

    def __init__(self, engine: Engine, *, profile: bool = False) -> None:
        """`profile`: exact stage times, for which every stage waits for the device."""
        self.engine = engine
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = engine.manifest.limits.max_batch
        self._slots = [_Slot() for _ in range(self.slots)]
        self.clock = StageClock(engine.synchronize if profile else None)
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def free_slots(self) -> int:
        return [s.user for s in self._slots].count(None)

    @property
    def cache_usage(self) -> float:
        """Share of the caches' rows that sequences with a slot take, from 0 to 1. Any thread may read it."""
        users = [slot.user for slot in self._slots if slot.user is not None]
        tokens = sum(len(user.prompt) + len(user.output) for user in users)
        return tokens / (self.slots * self.engine.manifest.limits.max_seq_len)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence in any state; its slot is free at once."""
        sequence.abort()
        sequence.released = True
        self.waiting = deque(s for s in self.waiting if not s.finished)
        self._sweep()

    def reset_prefix_cache(self) -> None:
        """Forget every cache; those of running sequences, which are not affected, when they end."""
        for index, slot in enumerate(self._slots):
            if slot.user is None:
                self.engine.truncate(index, 0)
                self._slots[index] = _Slot()
            else:
                slot.reusable = False

    def step(self) -> list[Sequence]:
        """Run one step; returns the sequences it advanced. An engine failure ends the sequences of the failed call."""
        self._steps += 1
        self._admit()
        advanced: list[Sequence] = []
        chunks = self._chunks()
        if not self.engine.mixes:
            for chunk in chunks:
                work = partial(prefill, self.engine, chunk, self.clock)
                advanced += self._guard([], [chunk.sequence], work)
            chunks = []
            self._sweep()  # a sequence is running, or has ended, with its first token
        if self.running or chunks:
            work = partial(decode_round, self.engine, self.running, self.clock, chunks)
            advanced += self._guard(self.running, [chunk.sequence for chunk in chunks], work)
        self._sweep()
        return list(dict.fromkeys(advanced))  # one whose prompt has ended may have had its first round, too

    def _chunks(self) -> list[PromptChunk]:
        """What the next pass takes of prompts: a chunk of the oldest; where the engine mixes them up to half of it is
        for others, the shortest first, which so do not wait for a long one, and up to half is left to the rows of the
        round. A constraint that takes long to compile keeps nobody waiting but its own sequence."""
        ready = [s for s in self.prefilling if s.sampler.prepare()]
        if not ready and not self.running:
            ready = [*self.prefilling][:1]
        if not ready:
            return []
        oldest, *others = ready if self.engine.mixes else ready[:1]
        chunks, room = list[PromptChunk](), self.engine.manifest.limits.prefill_chunk
        if self.engine.mixes:
            beside = sum(1 + s.metrics.drafted_tokens // max(1, s.metrics.rounds) for s in self.running)
            room = max(room - beside, (room + 1) // 2)
        kept = min(self._unread(oldest), (room + 1) // 2)
        for s in sorted(others, key=self._unread):
            if most := room - kept:
                chunks.append(PromptChunk(s, self.engine, most))
                room -= len(chunks[-1].tree)
        return [PromptChunk(oldest, self.engine, room), *chunks]

    def _unread(self, sequence: Sequence) -> int:
        """Tokens of the prompt that are not in the cache."""
        assert sequence.slot is not None, "a prompt is read only while its sequence holds a slot"
        return len(sequence.prompt) - self.engine.length(sequence.slot)

    def _guard(self, running: list[Sequence], reading: list[Sequence], work: Callable[[], None]) -> list[Sequence]:
        """Run `work` for sequences that run or whose prompts it reads; returns them. An exception ends them alone."""
        sequences = [*running, *reading]
        try:
            work()
        except BaseException as error:
            # At Ctrl-C too: interrupted work cannot be resumed.
            for s in sequences:
                s.abort(error if isinstance(error, Exception) else None)
                if s.slot is not None:
                    self.engine.truncate(s.slot, 0)
            if not isinstance(error, Exception):
                self._sweep()
                raise
        seconds = [(stage, spent) for stage, spent in self.clock.take().items() if spent]
        for s in running:
            for stage, spent in seconds:
                s.metrics.stage_s[stage] += spent
        for s in reading:
            s.metrics.stage_s["prefill"] += sum([spent for _, spent in seconds])
        return sequences

    def _admit(self) -> None:
        while self.waiting and self.free_slots:
            sequence = self.waiting.popleft()
            index, cached = self._best_slot(sequence)
            self.engine.truncate(index, cached)
            self._slots[index] = _Slot(user=sequence, last_used=self._steps)
            sequence.slot = index
            sequence.metrics.cached_tokens = cached
            sequence.metrics.scheduled_s = time.perf_counter()
            if sequence.params.prompt_logprobs is not None:
                sequence.prompt_logprobs.append(None)
            self.prefilling.append(sequence)

    def _best_slot(self, sequence: Sequence) -> tuple[int, int]:
        """A free slot and the tokens it saves: the one that saves most if that is half of the prompt or more, then an
        empty one, then the least recently used. So a beginning common to all prompts does not evict another chat."""
        usable = {i: self._usable(i, sequence) for i, s in enumerate(self._slots) if s.user is None}

        def preference(index: int) -> tuple[int, bool, int, int]:
            slot, saved = self._slots[index], usable[index]
            return saved if 2 * saved >= len(sequence.prompt) else 0, not slot.tokens, -slot.last_used, -index

        best = max(usable, key=preference)
        return best, usable[best]

    def _usable(self, index: int, sequence: Sequence) -> int:
        """Tokens of the prompt that the slot's cache holds and the sequence can start behind."""
        if sequence.params.skip_reading_prefix_cache or sequence.params.prompt_logprobs is not None:
            return 0  # for prompt_logprobs: the logits of every prompt row are needed
        kept = min(self.engine.length(index), _common_prefix(self._slots[index].tokens, sequence.prompt))
        if sequence.drafts:
            kept = self.engine.draftable(index, kept)
            if self.engine.manifest.drafting.shifted_inputs:
                # The row of the last common token was made with the token behind it, which the prompt may not have.
                kept = max(kept - 1, 0)
        # The last token is always computed, for its logits.
        return self.engine.restorable(index, min(kept, len(sequence.prompt) - 1))

    def _sweep(self) -> None:
        """Let sequences run that have their first token; free the slots of finished ones, which keep their caches."""
        both = [s for s in (*self.running, *self.prefilling) if s.finish_reason is None]
        self.running, self.prefilling = [s for s in both if s.output], deque([s for s in both if not s.output])
        for index, slot in enumerate(self._slots):
            if (user := slot.user) is not None and user.finish_reason is not None:
                if self.engine.rounds is not None:
                    self.engine.rounds.leave(index)
                # A stop string may have removed tokens that are in the cache: only listed tokens are reused.
                tokens = user.prompt + user.output if slot.reusable else []
                self._slots[index] = _Slot(tokens[: self.engine.length(index)], last_used=self._steps)
                user.released = True


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, by bisection: comparing slices is far faster than comparing items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
