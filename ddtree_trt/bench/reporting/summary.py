"""Statistics of a result: one row per prompt set, temperature and case.

Speedup is the paper's: the mean over prompts of seconds per token of `ar`, divided by that of the case, over the
prompts both have; its interval is a bootstrap over prompts. τ is the mean over prompts of each prompt's mean acceptance
length. Everything else is a median over prompts, with quartiles. Repeats of a prompt count as their median.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ddtree_trt.bench.result import BenchResult, Sample
from ddtree_trt.bench.settings import AUTO_TREE, BLOCK_CHAIN, SINGLE_TOKENS, Case
from ddtree_trt.runtime.decoding.methods import DDTREE
from ddtree_trt.runtime.stats import ROUND_STAGES, AutomaticRounds

BASELINE, CHAIN, AUTO = SINGLE_TOKENS.label, BLOCK_CHAIN.label, AUTO_TREE.label
RESAMPLES, CONFIDENCE = 2000, 0.95
ALL = "all"


@dataclass(frozen=True)
class Spread:
    """A value and an interval around it, whose meaning the field of `Row` states."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One case on one prompt set at one temperature."""

    source: str
    temperature: float
    case: Case
    prompts: int
    tokens_per_s: Spread  # median, quartiles
    speedup: Spread  # over `ar`, 95 % bootstrap
    auto_over: Spread | None  # tokens/s of `ddtree@auto` over the case's on the same prompt: median, quartiles
    tau: Spread | None  # mean, 95 % bootstrap; None where acceptance is not reported
    round_ms: Spread | None  # median, quartiles
    stage_ms: dict[str, float]  # median per round; empty where stages are not reported
    first_token_ms: float  # median
    mean_budget: float | None
    acceptance_by_depth: tuple[float, ...]  # share of rounds that accepted a draft token at depth 1, 2, …
    identical: int  # outputs equal to those of `ar` with the same seed
    comparable: int  # outputs that were compared
    automatic: AutomaticRounds  # of all requests


def summarize(result: BenchResult, *, pooled: bool = False) -> list[Row]:
    """Rows by prompt set, temperature and case, in the order they were given; `pooled` takes all sets as one."""
    groups: dict[tuple[str, float], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in result.samples:
        groups[ALL if pooled else sample.source, sample.temperature][sample.case].append(sample)
    order = [case.label for case in result.cases]
    rows = []
    for (source, temperature), cases in groups.items():
        for label in order:
            if label in cases and BASELINE in cases:
                case = Case.parse(label)
                rows.append(_row(source, temperature, case, cases[label], cases[BASELINE], cases.get(AUTO)))
    sources = list(dict.fromkeys(row.source for row in rows))
    return sorted(rows, key=lambda row: (sources.index(row.source), row.temperature))


def _row(
    source: str,
    temperature: float,
    case: Case,
    samples: list[Sample],
    baseline: list[Sample],
    auto: list[Sample] | None,
) -> Row:
    own, base, automatic = _token_s(samples), _token_s(baseline), _token_s(auto or [])
    common = [p for p in own if p in base]
    taus = _per_prompt(samples, _tau)
    rounds = [s for s in samples if s.acceptance_lengths]
    digests = {(s.prompt, s.repeat): s.output_digest for s in baseline}
    drawn_alike = not case.peer or temperature == 0  # a peer that samples draws by other random numbers
    compared = [s for s in samples if drawn_alike and s.output_digest is not None and (s.prompt, s.repeat) in digests]
    return Row(
        source=source,
        temperature=temperature,
        case=case,
        prompts=len(own),
        tokens_per_s=quartiles([1 / t for t in own.values()]),
        speedup=_ratio([base[p] for p in common], [own[p] for p in common]),
        auto_over=quartiles([own[p] / t for p, t in automatic.items() if p in own]) if automatic else None,
        tau=_mean(list(taus.values())) if taus else None,
        round_ms=quartiles([1000 * s.decode_s / len(s.acceptance_lengths or ()) for s in rounds]) if rounds else None,
        stage_ms=_stages(rounds),
        first_token_ms=median(1000 * s.first_token_s for s in samples),
        mean_budget=_optional_mean([s.mean_budget for s in samples]),
        acceptance_by_depth=_depths(samples),
        identical=sum(s.output_digest == digests[s.prompt, s.repeat] for s in compared),
        comparable=len(compared),
        automatic=AutomaticRounds.total(AutomaticRounds(**s.automatic) for s in samples if s.automatic),
    )


def _per_prompt(samples: Iterable[Sample], value: Callable[[Sample], float | None]) -> dict[str, float]:
    """The median over repeats of a figure, by prompt; prompts without one are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        figure = value(sample)
        if figure is not None:
            found[sample.prompt].append(figure)
    return {prompt: median(figures) for prompt, figures in found.items()}


def _token_s(samples: Iterable[Sample]) -> dict[str, float]:
    return {p: t for p, t in _per_prompt(samples, lambda s: s.token_s).items() if t > 0}


def _tau(sample: Sample) -> float | None:
    lengths = sample.acceptance_lengths
    return sum(lengths) / len(lengths) if lengths else None


def quartiles(values: Sequence[float]) -> Spread:
    """Median and quartiles; NaN where there are no values."""
    if not values:
        return Spread(*[float("nan")] * 3)
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def _resample(count: int) -> np.ndarray:
    """Indices [RESAMPLES, count] of prompts drawn with replacement, the same in every call."""
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Mean over mean of paired figures [prompts]."""
    if not above:
        return Spread(*[float("nan")] * 3)
    a, b = np.array(above), np.array(below)
    draws = _resample(len(a))
    return Spread(float(a.mean() / b.mean()), *_interval(a[draws].mean(axis=1) / b[draws].mean(axis=1)))


def _mean(values: Sequence[float]) -> Spread:
    v = np.array(values)
    return Spread(float(v.mean()), *_interval(v[_resample(len(v))].mean(axis=1)))


def _optional_mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _stages(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds per round by stage, and in `other` the remainder: scheduling, text, stop rules."""
    timed = [s for s in samples if s.stage_s and s.acceptance_lengths]
    if not timed:
        return {}
    per_round: dict[str, list[float]] = {stage: [] for stage in (*ROUND_STAGES, "other")}
    for s in timed:
        rounds = len(s.acceptance_lengths or ())
        for stage in ROUND_STAGES:
            per_round[stage].append(1000 * s.stage_s[stage] / rounds)
        rest = s.decode_s - sum(s.stage_s[stage] for stage in ROUND_STAGES)
        per_round["other"].append(1000 * max(rest, 0.0) / rounds)
    return {stage: median(values) for stage, values in per_round.items()}


def _depths(samples: Sequence[Sample]) -> tuple[float, ...]:
    lengths = [a for s in samples for a in s.acceptance_lengths or ()]
    deepest = max(lengths, default=1)
    return tuple(sum(a > d for a in lengths) / len(lengths) for d in range(1, deepest))


def best_fixed(rows: Sequence[Row], method: str = DDTREE.name, peer: str = "") -> Row | None:
    """The row of a method at its best fixed budget, by speedup, among rows of one set and temperature."""
    fixed = [r for r in rows if (r.case.method, r.case.peer) == (method, peer) and r.case.budget not in (None, "auto")]
    return max(fixed, key=lambda r: r.speedup.value, default=None)
