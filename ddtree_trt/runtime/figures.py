"""The table of the metrics that the HTTP server and the Triton model publish.

Each of the two publishes the rows that have a help text for it. The texts differ because the HTTP server counts a
request when it has ended, and the Triton model counts tokens while they arrive. Where vLLM publishes a figure of the
same meaning, the row has its names too, under which the HTTP server repeats it on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.stats import RequestMetrics

Unit = Literal["tokens", "tokens of a request", "rounds", "seconds", "seconds per token", "sequences", "share", "flag"]
# Bounds of histograms in seconds: six to a power of ten, so that a percentile read from them is right within the
# distance of two neighbours, at most half of the value.
SECONDS = tuple(round(step * 10.0**power, 6) for power in range(-3, 3) for step in (1, 1.5, 2, 3, 5, 7.5))
SECONDS_PER_TOKEN = tuple(round(step * 10.0**power, 7) for power in range(-4, 1) for step in (1, 1.5, 2, 3, 5, 7.5))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of the table."""

    name: str  # as published, without the prefix `ddtree_` and the suffix `_total` of a counter
    unit: Unit
    http: str | None  # help text of the HTTP server; None: not published by it
    triton: str | None  # help text of the Triton model; None: not published by it
    vllm: tuple[str, ...] = ()  # vLLM's names of figures of this meaning, without the suffix `_total` of a counter

    @property
    def published(self) -> str:
        """The full name, as Prometheus shows it."""
        return f"ddtree_{self.name}"


@dataclass(frozen=True, kw_only=True)
class Counter(Figure):
    """A figure that requests increase."""

    read: Callable[[RequestMetrics], float]
    of_prompt: bool = False  # common to a request's sequences, so counted for one of them

    @property
    def published(self) -> str:
        return f"ddtree_{self.name}_total"


@dataclass(frozen=True, kw_only=True)
class Positions(Figure):
    """A counter for each position of a draft, from 0, in the label `position`."""

    read: Callable[[RequestMetrics], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Histogram(Figure):
    """A figure to which each sequence adds its observations when it has ended."""

    read: Callable[[RequestMetrics], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Gauge(Figure):
    """A figure of the engine's current state."""

    read: Callable[[AsyncLLM], float]


COUNTERS = (
    Counter(
        name="prompt_tokens",
        unit="tokens",
        http="Prompt tokens of ended requests.",
        triton="Prompt tokens of started requests",
        vllm=("vllm:prompt_tokens",),
        read=lambda m: m.prompt_tokens,
        of_prompt=True,
    ),
    Counter(
        name="prompt_tokens_cached",
        unit="tokens",
        http="Of these, found in a slot's cache.",
        triton=None,
        vllm=("vllm:prefix_cache_hits",),
        read=lambda m: m.cached_tokens,
    ),
    Counter(
        name="prompt_tokens_looked_up",
        unit="tokens",
        http=None,
        triton=None,
        vllm=("vllm:prefix_cache_queries",),
        read=lambda m: m.prompt_tokens,
    ),
    Counter(
        name="generation_tokens",
        unit="tokens",
        http="Tokens generated.",
        triton="Generated tokens",
        vllm=("vllm:generation_tokens",),
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
        name="rounds_with_draft",
        unit="rounds",
        http="Of these, with draft tokens.",
        triton="Of these, with draft tokens",
        vllm=("vllm:spec_decode_num_drafts",),
        read=lambda m: m.drafting_rounds,
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
        vllm=("vllm:spec_decode_num_draft_tokens",),
        read=lambda m: m.drafted_tokens,
    ),
    Counter(
        name="draft_tokens_accepted",
        unit="tokens",
        http="Draft tokens that became output.",
        triton="Draft tokens accepted; over the rounds: accepted per round",
        vllm=("vllm:spec_decode_num_accepted_tokens",),
        read=lambda m: m.accepted_tokens,
    ),
    Counter(
        name="auto_rounds",
        unit="rounds",
        http="Rounds whose budget was chosen automatically.",
        triton=None,
        read=lambda m: m.automatic.rounds,
    ),
    Counter(
        name="auto_rounds_with_draft",
        unit="rounds",
        http="Of these, with a draft.",
        triton=None,
        read=lambda m: m.automatic.drafted,
    ),
    Counter(
        name="auto_rounds_probing",
        unit="rounds",
        http="Of those with a draft, made only to see whether drafting pays again.",
        triton=None,
        read=lambda m: m.automatic.probes,
    ),
    Counter(
        name="auto_expected_tokens",
        unit="tokens",
        http="Tokens expected of the rounds with a draft.",
        triton=None,
        read=lambda m: m.automatic.expected_tokens,
    ),
    Counter(
        name="auto_committed_tokens",
        unit="tokens",
        http="Tokens that they committed.",
        triton=None,
        read=lambda m: m.automatic.committed_tokens,
    ),
    Counter(
        name="auto_expected_seconds",
        unit="seconds",
        http="Seconds expected of them.",
        triton=None,
        read=lambda m: m.automatic.expected_s,
    ),
    Counter(
        name="auto_single_token_seconds",
        unit="seconds",
        http="Seconds that as many rounds without a draft take.",
        triton=None,
        read=lambda m: m.automatic.single_token_s,
    ),
)
POSITIONS = (
    Positions(
        name="draft_tokens_accepted_per_position",
        unit="tokens",
        http=None,  # `acceptance_length` has it
        triton=None,
        vllm=("vllm:spec_decode_num_accepted_tokens_per_pos",),
        read=lambda m: m.accepted_by_position,
    ),
)
HISTOGRAMS = (
    Histogram(
        name="time_to_first_token_seconds",
        unit="seconds",
        http="From submission to the first token.",
        triton="From submission to the first token",
        vllm=("vllm:time_to_first_token_seconds",),
        read=lambda m: _known(m.time_to_first_token_s),
    ),
    Histogram(
        name="time_per_output_token_seconds",
        unit="seconds per token",
        http="Mean, after the first token.",
        triton="Mean, after the first token",
        vllm=("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
        read=lambda m: _known(m.time_per_output_token_s),
    ),
    Histogram(
        name="e2e_request_latency_seconds",
        unit="seconds",
        http="From submission to the last token.",
        triton="From submission to the last token",
        vllm=("vllm:e2e_request_latency_seconds",),
        read=lambda m: _known(m.latency_s),
    ),
    Histogram(
        name="request_queue_time_seconds",
        unit="seconds",
        http="From submission to getting a slot.",
        triton="From submission to getting a slot",
        vllm=("vllm:request_queue_time_seconds",),
        read=lambda m: _known(m.queue_time_s),
    ),
    Histogram(
        name="request_prefill_time_seconds",
        unit="seconds",
        http="From getting a slot to the first token.",
        triton=None,
        vllm=("vllm:request_prefill_time_seconds",),
        read=lambda m: _known(m.prefill_time_s),
    ),
    Histogram(
        name="request_decode_time_seconds",
        unit="seconds",
        http="From the first token to the last.",
        triton=None,
        vllm=("vllm:request_decode_time_seconds",),
        read=lambda m: _known(m.decode_time_s),
    ),
    Histogram(
        name="request_inference_time_seconds",
        unit="seconds",
        http=None,
        triton=None,
        vllm=("vllm:request_inference_time_seconds",),
        read=lambda m: _known(m.inference_time_s),
    ),
    Histogram(
        name="inter_token_latency_seconds",
        unit="seconds per token",
        http="Between the tokens of successive rounds of a sequence.",
        triton=None,
        vllm=("vllm:inter_token_latency_seconds",),
        read=lambda m: m.round_intervals_s,
    ),
    Histogram(
        name="request_prompt_tokens",
        unit="tokens of a request",
        http=None,
        triton=None,
        vllm=("vllm:request_prompt_tokens",),
        read=lambda m: (m.prompt_tokens,),
    ),
    Histogram(
        name="request_generation_tokens",
        unit="tokens of a request",
        http=None,
        triton=None,
        vllm=("vllm:request_generation_tokens",),
        read=lambda m: (m.output_tokens,),
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
        vllm=("vllm:num_requests_running",),
        read=lambda llm: llm.running,
    ),
    Gauge(
        name="requests_waiting",
        unit="sequences",
        http="Sequences that wait for a slot.",
        triton="Sequences that wait for a slot",
        vllm=("vllm:num_requests_waiting",),
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
        name="cache_usage",
        unit="share",
        http="Share of the caches' rows that running sequences take.",
        triton="Share of the caches' rows that running sequences take",
        vllm=("vllm:kv_cache_usage_perc",),
        read=lambda llm: llm.cache_usage,
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
