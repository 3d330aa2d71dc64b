"""The metrics that the HTTP server and the Triton model publish, each in one row.

A figure that vLLM publishes has vLLM's name and meaning, any other one a name with the prefix `ddtree_`. A request is
counted when it has ended.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

Unit = Literal["seconds", "seconds per token", "tokens of a round", "tokens of a request"]
# Bounds of histograms in seconds: six to a power of ten, so that a percentile read from them is right within the
# distance of two neighbours, at most half of the value.
SECONDS = tuple(round(step * 10.0**power, 6) for power in range(-3, 3) for step in (1, 1.5, 2, 3, 5, 7.5))
SECONDS_PER_TOKEN = tuple(round(step * 10.0**power, 7) for power in range(-4, 1) for step in (1, 1.5, 2, 3, 5, 7.5))


@dataclass(frozen=True)
class MetricSpec:
    """A row of the table."""

    name: str  # as Prometheus shows it
    text: str
    figure: str  # the attribute that has it: of RequestMetrics, or of AsyncLLM for a gauge
    triton: bool = False  # published by the Triton model too
    of_prompt: bool = False  # common to a request's sequences, so counted for one of them
    unit: Unit = "seconds"  # of a histogram: decides its bounds

    def read(self, source: Any) -> float:
        """The figure of a counter or a gauge."""
        value: float = attrgetter(self.figure)(source)
        return value

    def observations(self, source: Any) -> list[float]:
        """The figures of a histogram, or one for each position; none where a figure is absent."""
        value = attrgetter(self.figure)(source)
        return value if isinstance(value, list) else [] if value is None else [value]


def _each(*rows: tuple[str, str, str], **fields: Any) -> tuple[MetricSpec, ...]:
    """Rows that share the other fields."""
    return tuple(MetricSpec(*row, **fields) for row in rows)


COUNTERS = (
    MetricSpec("vllm:prompt_tokens_total", "Prompt tokens.", "prompt_tokens", triton=True, of_prompt=True),
    *_each(
        ("vllm:generation_tokens_total", "Tokens generated.", "output_tokens"),
        ("ddtree_rounds_total", "Decode rounds, counted per sequence.", "rounds"),
        ("vllm:spec_decode_num_drafts_total", "Rounds with draft tokens.", "drafting_rounds"),
        ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified.", "drafted_tokens"),
        ("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that became output.", "accepted_tokens"),
        triton=True,
    ),
    *_each(
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in caches.", "prompt_tokens"),
        ("vllm:prefix_cache_hits_total", "Prompt tokens found there.", "cached_tokens"),
        ("ddtree_rounds_on_device_total", "Decode rounds without the host.", "rounds_on_device"),
        ("ddtree_auto_rounds_total", "Rounds whose budget was chosen automatically.", "automatic.rounds"),
        ("ddtree_auto_rounds_with_draft_total", "Of these, with a draft.", "automatic.drafted"),
        ("ddtree_auto_rounds_probing_total", "Of those, to see whether drafting pays again.", "automatic.probes"),
        ("ddtree_auto_expected_tokens_total", "Tokens expected of those with a draft.", "automatic.expected_tokens"),
        ("ddtree_auto_committed_tokens_total", "Tokens that they committed.", "automatic.committed_tokens"),
        ("ddtree_auto_expected_seconds_total", "Seconds expected of them.", "automatic.expected_s"),
        ("ddtree_auto_single_token_seconds_total", "The same without drafts.", "automatic.single_token_s"),
    ),
)
# A counter for each position of a draft, from 0, in the label `position`.
POSITIONS = _each(
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Rounds that accepted here.", "accepted_by_position")
)
# To which each sequence adds its observations when it has ended.
HISTOGRAMS = (
    *_each(
        ("vllm:time_to_first_token_seconds", "From submission to the first token.", "time_to_first_token_s"),
        ("vllm:e2e_request_latency_seconds", "From submission to the last token.", "latency_s"),
        ("vllm:request_queue_time_seconds", "From submission to getting a slot.", "queue_time_s"),
        triton=True,
    ),
    *_each(
        ("vllm:request_time_per_output_token_seconds", "Mean after the first token.", "time_per_output_token_s"),
        triton=True,
        unit="seconds per token",
    ),
    *_each(
        ("vllm:request_prefill_time_seconds", "From getting a slot to the first token.", "prefill_time_s"),
        ("vllm:request_decode_time_seconds", "From the first token to the last.", "decode_time_s"),
        ("vllm:request_inference_time_seconds", "From getting a slot to the last token.", "inference_time_s"),
    ),
    *_each(
        ("vllm:inter_token_latency_seconds", "Between the tokens of successive rounds.", "round_intervals_s"),
        unit="seconds per token",
    ),
    *_each(
        ("vllm:request_prompt_tokens", "Prompt tokens of a sequence.", "prompt_tokens"),
        ("vllm:request_generation_tokens", "Tokens generated by a sequence.", "output_tokens"),
        unit="tokens of a request",
    ),
    *_each(("ddtree_acceptance_length", "Tokens committed per round.", "acceptance_lengths"), unit="tokens of a round"),
)
# The engine's state, read at each scrape.
GAUGES = _each(
    ("vllm:num_requests_running", "Sequences that hold a slot.", "running"),
    ("vllm:num_requests_waiting", "Sequences that wait for a slot.", "waiting"),
    ("ddtree_slots", "Sequences that can run at a time.", "slots"),
    ("vllm:kv_cache_usage_perc", "Share of the caches' rows that sequences take.", "core.scheduler.cache_usage"),
    ("ddtree_engine_failed", "1 when the engine stopped for good: start it anew.", "failed"),
    triton=True,
)
