"""Stage times and the metrics of one request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_trt.runtime.decoding.budget.policy import Decision

ROUND_STAGES = ("draft", "tree_build", "tree_compile", "verify", "commit")
DEVICE_ROUND = "device_round"  # all five in one, where the host cannot time stages
STAGES = ("prefill", *ROUND_STAGES, DEVICE_ROUND)
# What JSON has of a request's metrics, beside two that are written in another form.
_SHOWN = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "rounds", "drafted_tokens", "accepted_tokens"),
    *("acceptance_rate", "mean_acceptance_length", "acceptance_lengths", "acceptance_by_depth", "mean_budget"),
    *("budgets", "queue_time_s", "time_to_first_token_s", "time_per_output_token_s", "decode_tokens_per_s"),
    *("stage_s", "on_device", "why_host"),
)
_SUMMED = ("output_tokens", "rounds", "committed_tokens", "drafted_tokens", "drafting_rounds", "rounds_on_device")
_ENGINE_STAGES = frozenset(("prefill", "draft", "verify", "commit", DEVICE_ROUND))  # the other stages run on the host


class StageClock:
    """Seconds spent in each stage since the last `take`. Stages do not nest."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` waits until the engine's device is idle: after each of its stages, whose times so are exact."""
        self._synchronize = synchronize
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def __call__(self, stage: str) -> StageClock:
        self._stage, self._start = stage, time.perf_counter()
        return self

    def __enter__(self) -> None:
        """Its time runs already."""

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._synchronize is not None and self._stage in _ENGINE_STAGES:
            self._synchronize()
        self.seconds[self._stage] += time.perf_counter() - self._start

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(STAGES, 0.0)
        return taken


@dataclass
class AutomaticRounds:
    """Why automatic budgets drafted: sums over the rounds whose budget was chosen."""

    rounds: int = 0
    drafted: int = 0  # rounds with a draft; what follows is of these
    probes: int = 0  # drafted only to see whether drafting pays again
    expected_tokens: float = 0.0  # each round's last token, which was not drafted, included
    committed_tokens: int = 0
    expected_s: float = 0.0  # of a pass with other slots, one's share
    single_token_s: float = 0.0  # what as many rounds without a draft take

    def add(self, decision: Decision, tokens: int) -> None:
        self.rounds += 1
        if decision.drafted:
            self.drafted += 1
            self.probes += decision.probe
            self.expected_tokens += decision.expected_tokens
            self.committed_tokens += tokens
            self.expected_s += decision.expected_s
            self.single_token_s += decision.single_token_s


def _span(start: str, end: str, meaning: str) -> property:
    """Seconds from one time of a request to another; None while one of them is missing."""

    def seconds(metrics: RequestMetrics) -> float | None:
        from_s, to_s = getattr(metrics, start), getattr(metrics, end)
        return None if from_s is None or to_s is None else to_s - from_s

    return property(seconds, doc=meaning)


@dataclass
class RequestMetrics:
    """Token counts, acceptance and wall-clock times; a stage shared by several slots counts in full for each."""

    arrival_s: float = field(default_factory=time.perf_counter)
    scheduled_s: float | None = None  # when it got a slot
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in a slot's cache
    output_tokens: int = 0
    rounds: int = 0
    committed_tokens: int = 0  # by rounds, bonus tokens included
    drafted_tokens: int = 0  # draft nodes verified
    drafting_rounds: int = 0  # rounds that verified some
    rounds_on_device: int = 0
    # Copies share the list: it only grows, and its first `rounds` are theirs. Of several sequences `parts` have it.
    _history: list[tuple[int, int, float]] = field(default_factory=list, repr=False)
    parts: tuple[RequestMetrics, ...] = field(default=(), repr=False)
    automatic: AutomaticRounds = field(default_factory=AutomaticRounds)
    round_end_s: float | None = None  # when the latest round's tokens were emitted
    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    on_device: bool = False  # whether rounds stay on the device, but where they are beside one that cannot
    why_host: str | None = None  # the reason where rounds run on the host

    def add_round(self, tokens: int, nodes: int, decision: Decision | None = None) -> None:
        """Count a round that committed `tokens` and verified `nodes`; `decision` where the budget was chosen."""
        if decision is not None:
            self.automatic.add(decision, tokens)
        end, before = self.last_token_s or 0.0, self.round_end_s or self.first_token_s or 0.0
        self._history.append((tokens, nodes, end - before))
        self.round_end_s = end
        self.rounds += 1
        self.committed_tokens += tokens
        self.drafted_tokens += nodes
        self.drafting_rounds += nodes > 0

    @property
    def history(self) -> list[tuple[int, int, float]]:
        """Of each round its committed tokens, nodes verified, and seconds since the tokens of the round before."""
        return [each for p in self.parts for each in p.history] if self.parts else self._history[: self.rounds]

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens committed per round, the bonus token included."""
        return [tokens for tokens, _, _ in self.history]

    @property
    def budgets(self) -> list[int]:
        """Draft nodes verified per round."""
        return [nodes for _, nodes, _ in self.history]

    @property
    def round_intervals_s(self) -> list[float]:
        """Seconds between the tokens of successive rounds."""
        return [seconds for _, _, seconds in self.history]

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that became output; each round's last token was not drafted."""
        return self.committed_tokens - self.rounds

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return self.committed_tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_budget(self) -> float:
        return self.drafted_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of rounds that accepted a draft token at depth 1, 2, …"""
        return [rounds / self.rounds for rounds in self.accepted_by_position]

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Rounds by the number of tokens they committed."""
        return dict(sorted(Counter(self.acceptance_lengths).items()))

    @property
    def accepted_by_position(self) -> list[int]:
        """How many rounds accepted a draft token at depth 1, 2, …, as far as one did."""
        lengths = self.acceptance_lengths
        return [sum(a > d for a in lengths) for d in range(1, max(lengths, default=1))]

    def accepted_histogram(self, longest: int) -> list[int]:
        """How many rounds with draft nodes accepted 0, 1, … of them, up to `longest` or the most that one did."""
        counts = Counter(tokens - 1 for tokens, nodes, _ in self.history if nodes)
        return [counts[accepted] for accepted in range(1 + max(longest, *counts, 0))]

    queue_time_s = _span("arrival_s", "scheduled_s", "From the request's arrival until it got a slot.")
    prefill_time_s = _span("scheduled_s", "first_token_s", "From getting a slot to the first token.")
    decode_time_s = _span("first_token_s", "last_token_s", "From the first token to the last.")
    inference_time_s = _span("scheduled_s", "last_token_s", "From getting a slot to the last token.")
    time_to_first_token_s = _span("arrival_s", "first_token_s", "From the request's arrival to its first token.")
    latency_s = _span("arrival_s", "last_token_s", "From the request's arrival to its last token.")

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between output tokens after the first."""
        spent_s: float | None = self.decode_time_s
        return None if spent_s is None or self.output_tokens < 2 else spent_s / (self.output_tokens - 1)

    @property
    def decode_tokens_per_s(self) -> float | None:
        per_token = self.time_per_output_token_s
        return 1 / per_token if per_token else None

    def to_dict(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in _SHOWN},
            "acceptance_histogram": {str(k): v for k, v in self.acceptance_histogram.items()},
            "automatic": asdict(self.automatic),
        }


def merge(parts: Iterable[RequestMetrics]) -> RequestMetrics:
    """A copy of the metrics of a request's sequences in one: counts are summed, times span all of them."""
    parts = [replace(part, automatic=replace(part.automatic), stage_s=dict(part.stage_s)) for part in parts]
    if len(parts) == 1:
        return parts[0]

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    return replace(
        parts[0],  # prompt and route are common to all completions of a request
        **{name: sum(getattr(p, name) for p in parts) for name in _SUMMED},
        arrival_s=min(p.arrival_s for p in parts),
        scheduled_s=min(known("scheduled_s"), default=None),
        first_token_s=min(known("first_token_s"), default=None),
        last_token_s=max(known("last_token_s"), default=None),
        parts=tuple(parts),
        automatic=AutomaticRounds(*map(sum, zip(*(astuple(p.automatic) for p in parts), strict=True))),
        stage_s={s: sum(p.stage_s[s] for p in parts) for s in STAGES},
    )
