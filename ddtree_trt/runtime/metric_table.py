"""The metrics that the HTTP server and the Triton model publish, each in one row.

A figure that vLLM publishes has vLLM's name and meaning, any other one a name with the prefix `ddtree_`. The HTTP
server counts a request when it has ended, the Triton model counts tokens while they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ddtree_trt.runtime.stats import RequestMetrics

if TYPE_CHECKING:
    from ddtree_trt.runtime.async_llm import AsyncLLM

Source = TypeVar("Source")
Value = TypeVar("Value")
Unit = Literal["seconds", "seconds per token", "tokens of a round", "tokens of a request"]
# Bounds of histograms in seconds: six to a power of ten, so that a percentile read from them is right within the
# distance of two neighbours, at most half of the value.
SECONDS = tuple(round(step * 10.0**power, 6) for power in range(-3, 3) for step in (1, 1.5, 2, 3, 5, 7.5))
SECONDS_PER_TOKEN = tuple(round(step * 10.0**power, 7) for power in range(-4, 1) for step in (1, 1.5, 2, 3, 5, 7.5))


@dataclass(frozen=True)
class MetricSpec(Generic[Source, Value]):
    """A row of the table."""

    name: str  # as Prometheus shows it
    text: str
    read: Callable[[Source], Value]
    triton: bool = False  # published by the Triton model too; where `http` is False, by it alone
    http: bool = True
    of_prompt: bool = False  # common to a request's sequences, so counted for one of them
    unit: Unit = "seconds"  # of a histogram: decides its bounds


Counted = MetricSpec[RequestMetrics, float]
Observed = MetricSpec[RequestMetrics, Sequence[float]]

COUNTERS: tuple[Counted, ...] = (
    MetricSpec("vllm:prompt_tokens_total", "Prompt tokens.", lambda m: m.prompt_tokens, triton=True, of_prompt=True),
    MetricSpec("vllm:prefix_cache_queries_total", "Prompt tokens looked up in caches.", lambda m: m.prompt_tokens),
    MetricSpec("vllm:prefix_cache_hits_total", "Prompt tokens found there.", lambda m: m.cached_tokens),
    MetricSpec("vllm:generation_tokens_total", "Tokens generated.", lambda m: m.output_tokens, triton=True),
    MetricSpec("ddtree_rounds_total", "Decode rounds, counted per sequence.", lambda m: m.rounds, triton=True),
    MetricSpec(
        "ddtree_rounds_on_device_total",
        "Of these, without the host.",
        lambda m: m.rounds if m.on_device else 0,
    ),
    MetricSpec(
        "vllm:spec_decode_num_drafts_total",
        "Rounds with draft tokens.",
        lambda m: m.drafting_rounds,
        triton=True,
    ),
    MetricSpec(
        "vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified.", lambda m: m.drafted_tokens, triton=True
    ),
    MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Draft tokens that became output.",
        lambda m: m.accepted_tokens,
        triton=True,
    ),
    MetricSpec(
        "ddtree_auto_rounds_total", "Rounds whose budget was chosen automatically.", lambda m: m.automatic.rounds
    ),
    MetricSpec("ddtree_auto_rounds_with_draft_total", "Of these, with a draft.", lambda m: m.automatic.drafted),
    MetricSpec(
        "ddtree_auto_rounds_probing_total",
        "Of those with a draft, made only to see whether drafting pays again.",
        lambda m: m.automatic.probes,
    ),
    MetricSpec(
        "ddtree_auto_expected_tokens_total",
        "Tokens expected of the rounds with a draft.",
        lambda m: m.automatic.expected_tokens,
    ),
    MetricSpec(
        "ddtree_auto_committed_tokens_total", "Tokens that they committed.", lambda m: m.automatic.committed_tokens
    ),
    MetricSpec("ddtree_auto_expected_seconds_total", "Seconds expected of them.", lambda m: m.automatic.expected_s),
    MetricSpec(
        "ddtree_auto_single_token_seconds_total",
        "Seconds that as many rounds without a draft take.",
        lambda m: m.automatic.single_token_s,
    ),
)
# A counter for each position of a draft, from 0, in the label `position`.
POSITIONS: tuple[Observed, ...] = (
    MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Rounds that accepted a draft token at this position.",
        lambda m: m.accepted_by_position,
    ),
)
# To which each sequence adds its observations when it has ended.
HISTOGRAMS: tuple[Observed, ...] = (
    MetricSpec(
        "vllm:time_to_first_token_seconds",
        "From submission to the first token.",
        lambda m: _known(m.time_to_first_token_s),
        triton=True,
    ),
    MetricSpec(
        "vllm:request_time_per_output_token_seconds",
        "Mean of a sequence, after the first token.",
        lambda m: _known(m.time_per_output_token_s),
        triton=True,
        unit="seconds per token",
    ),
    MetricSpec(
        "vllm:e2e_request_latency_seconds",
        "From submission to the last token.",
        lambda m: _known(m.latency_s),
        triton=True,
    ),
    MetricSpec(
        "vllm:request_queue_time_seconds",
        "From submission to getting a slot.",
        lambda m: _known(m.queue_time_s),
        triton=True,
    ),
    MetricSpec(
        "vllm:request_prefill_time_seconds",
        "From getting a slot to the first token.",
        lambda m: _known(m.prefill_time_s),
    ),
    MetricSpec(
        "vllm:request_decode_time_seconds", "From the first token to the last.", lambda m: _known(m.decode_time_s)
    ),
    MetricSpec(
        "vllm:request_inference_time_seconds",
        "From getting a slot to the last token.",
        lambda m: _known(m.inference_time_s),
    ),
    MetricSpec(
        "vllm:inter_token_latency_seconds",
        "Between the tokens of successive rounds of a sequence.",
        lambda m: m.round_intervals_s,
        unit="seconds per token",
    ),
    MetricSpec(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a sequence.",
        lambda m: (m.prompt_tokens,),
        unit="tokens of a request",
    ),
    MetricSpec(
        "vllm:request_generation_tokens",
        "Tokens generated by a sequence.",
        lambda m: (m.output_tokens,),
        unit="tokens of a request",
    ),
    MetricSpec(
        "ddtree_acceptance_length",
        "Tokens committed per round.",
        lambda m: m.acceptance_lengths,
        unit="tokens of a round",
    ),
)
# The engine's state, read at each scrape.
GAUGES: tuple[MetricSpec[AsyncLLM, float], ...] = (
    MetricSpec("vllm:num_requests_running", "Sequences that hold a slot.", lambda llm: llm.running, triton=True),
    MetricSpec("vllm:num_requests_waiting", "Sequences that wait for a slot.", lambda llm: llm.waiting, triton=True),
    MetricSpec("ddtree_slots", "Sequences that can run at a time.", lambda llm: llm.slots, triton=True),
    MetricSpec(
        "vllm:kv_cache_usage_perc",
        "Share of the caches' rows that running sequences take.",
        lambda llm: llm.cache_usage,
        triton=True,
    ),
    MetricSpec(
        "ddtree_engine_failed",
        "1 when the engine stopped for good and the model must be reloaded.",
        lambda llm: int(llm.failure is not None),
        triton=True,
        http=False,
    ),
)


def _known(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)
