"""The table of the metrics that the HTTP server and the Triton model publish.

Each of the two publishes the rows that have a help text for it. The texts differ because the HTTP server counts a
request when it has ended, and the Triton model while its tokens arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.stats import RequestMetrics

Unit = Literal["tokens", "rounds", "seconds", "seconds per token", "sequences", "flag"]


@dataclass(frozen=True)
class Figure:
    """A row of the table."""

    name: str  # as published, without the prefix `ddtree_` and the suffix `_total` of a counter
    unit: Unit
    http: str | None  # help text of the HTTP server; None: not published by it
    triton: str | None  # help text of the Triton model; None: not published by it

    @property
    def published(self) -> str:
        """The full name, as Prometheus shows it."""
        return f"ddtree_{self.name}"


@dataclass(frozen=True)
class Counter(Figure):
    """A figure that requests increase."""

    read: Callable[[RequestMetrics], int]
    of_prompt: bool = False  # common to a request's sequences, so counted for one of them

    @property
    def published(self) -> str:
        return f"ddtree_{self.name}_total"


@dataclass(frozen=True)
class Histogram(Figure):
    """A figure to which each sequence adds its observations when it has ended."""

    read: Callable[[RequestMetrics], Sequence[float]]


@dataclass(frozen=True)
class Gauge(Figure):
    """A figure of the engine's current state."""

    read: Callable[[AsyncLLM], int]


COUNTERS = (
    Counter(
        name="prompt_tokens",
        unit="tokens",
        http="Prompt tokens of ended requests.",
        triton="Prompt tokens of started requests",
        read=lambda m: m.prompt_tokens,
        of_prompt=True,
    ),
    Counter(
        name="prompt_tokens_cached",
        unit="tokens",
        http="Of these, found in a slot's cache.",
        triton=None,
        read=lambda m: m.cached_tokens,
    ),
    Counter(
        name="generation_tokens",
        unit="tokens",
        http="Tokens generated.",
        triton="Generated tokens",
        read=lambda m: m.output_tokens,
    ),
    Counter(
        name="rounds",
        unit="rounds",
        http="Decode rounds.",
        triton="Decoding rounds, counted per sequence",
        read=lambda m: m.rounds,
    ),
    Counter(
        name="rounds_on_device",
        unit="rounds",
        http="Of these, without the host.",
        triton=None,
        read=lambda m: m.rounds if m.on_device else 0,
    ),
    Counter(
        name="draft_tokens",
        unit="tokens",
        http="Draft tokens verified.",
        triton="Draft tokens verified; over the rounds: the tree budget in use",
        read=lambda m: m.drafted_tokens,
    ),
    Counter(
        name="draft_tokens_accepted",
        unit="tokens",
        http="Draft tokens that became output.",
        triton="Draft tokens accepted; over the rounds: accepted per round",
        read=lambda m: m.accepted_tokens,
    ),
)
HISTOGRAMS = (
    Histogram(
        name="time_to_first_token_seconds",
        unit="seconds",
        http="From submission to the first token.",
        triton=None,
        read=lambda m: _known(m.time_to_first_token_s),
    ),
    Histogram(
        name="time_per_output_token_seconds",
        unit="seconds per token",
        http="Mean, after the first token.",
        triton=None,
        read=lambda m: _known(m.time_per_output_token_s),
    ),
    Histogram(
        name="e2e_request_latency_seconds",
        unit="seconds",
        http="From submission to the last token.",
        triton=None,
        read=lambda m: _known(m.latency_s),
    ),
    Histogram(
        name="acceptance_length",
        unit="tokens",
        http="Tokens committed per round.",
        triton=None,
        read=lambda m: m.acceptance_lengths,
    ),
)
GAUGES = (
    Gauge(
        name="requests_running",
        unit="sequences",
        http="Sequences that hold a slot.",
        triton="Sequences that hold a slot",
        read=lambda llm: llm.running,
    ),
    Gauge(
        name="requests_waiting",
        unit="sequences",
        http="Sequences that wait for a slot.",
        triton="Sequences that wait for a slot",
        read=lambda llm: llm.waiting,
    ),
    Gauge(
        name="slots",
        unit="sequences",
        http="Sequences that can run at a time.",
        triton="Sequences that can run at a time",
        read=lambda llm: llm.slots,
    ),
    Gauge(
        name="engine_failed",
        unit="flag",
        http=None,
        triton="1 when the engine stopped for good and the model must be reloaded",
        read=lambda llm: int(llm.failure is not None),
    ),
)


def _known(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)
