"""The protocol by which the runner measures this engine and its peers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ddtree_trt.bench.settings import Case


@dataclass(frozen=True)
class Request:
    """The stop and sampling rules of one request, the same for every contender."""

    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]  # empty when nothing ends a request before max_tokens


@dataclass(frozen=True)
class Outcome:
    """The output and times of one request. Seconds are wall-clock; nothing of the prompt was cached."""

    output_tokens: int
    first_token_s: float  # from the call to the end of the first step
    decode_s: float  # from the end of the first step to the end
    first_tokens: int = 1  # tokens of the first step: more than one where it already speculates
    token_ids: tuple[int, ...] | None = None  # None from a peer that gives text only
    text: str | None = None
    acceptance_lengths: tuple[int, ...] | None = None  # tokens per round, bonus included; None: not reported
    mean_budget: float | None = None  # draft nodes verified per round
    automatic: Mapping[str, float] | None = None  # AutomaticRounds; None where no budget was chosen automatically
    stage_s: Mapping[str, float] = field(default_factory=dict)  # seconds per stage; empty: not reported


class Contender(Protocol):
    """An implementation that can run cases. Loaded once; its runs are independent of each other."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases it can run."""

    def describe(self) -> dict[str, str]:
        """Versions and settings that a reader of its figures must know."""

    def run(self, case: Case, prompt_ids: Sequence[int], request: Request) -> Outcome:
        """Run one request from a cold cache. Raises DDTreeError when it cannot."""

    def close(self) -> None:
        """Release memory, processes and connections."""


class TokenClock:
    """Arrival times of streamed tokens, from which an Outcome is made.

    A step of several tokens counts as one round of speculation, which is right unless the sender merges steps.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._times: list[float] = []
        self._counts: list[int] = []

    def arrived(self, tokens: int) -> None:
        """Record a step of `tokens` new tokens."""
        if tokens > 0:
            self._times.append(time.perf_counter())
            self._counts.append(tokens)

    def outcome(
        self, token_ids: Sequence[int] | None, *, output_tokens: int | None = None, text: str | None = None
    ) -> Outcome:
        """The outcome of the request; `output_tokens` replaces the count where the steps' tokens are not known."""
        counted = output_tokens is None
        tokens = sum(self._counts) if output_tokens is None else output_tokens
        first, last = (self._times[0], self._times[-1]) if self._times else (self._start, self._start)
        return Outcome(
            output_tokens=tokens,
            first_token_s=first - self._start,
            decode_s=last - first,
            first_tokens=self._counts[0] if counted and self._counts else 1,
            token_ids=None if token_ids is None else tuple(token_ids),
            text=text,
            acceptance_lengths=tuple(self._counts[1:]) if counted else None,
        )
