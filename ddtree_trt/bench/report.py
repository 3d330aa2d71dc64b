"""A result as figures of each case, as text, and as a picture.

Speedup is the DDTree paper's: the mean over prompts of seconds per token of `ar`, divided by that of the case; its
interval is a bootstrap over prompts. τ is the mean over prompts of tokens committed per round, bonus token included.
All else is a median over prompts. Repeats of a prompt count as their median.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from ddtree_trt.bench.measure import BASELINE, BenchResult, Outcome, Sample
from ddtree_trt.device.cpu import busy_warning
from ddtree_trt.runtime.stats import ROUND_STAGES

RESAMPLES, TAILS = 2000, (2.5, 97.5)
STAGES = (*ROUND_STAGES, "other")  # the last: scheduling, text, stop rules
LEGEND = (
    "tokens/s: median over prompts [quartiles]. speedup: mean seconds per token of ar over the case's [95 % bootstrap "
    "over prompts]. τ: tokens committed per round, bonus included. same as ar: requests whose tokens are those of ar."
)


@dataclass(frozen=True)
class Spread:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    source: str
    case: str
    prompts: int
    tokens_per_s: Spread  # median, quartiles
    speedup: Spread  # over `ar`, 95 % bootstrap
    tau: float | None  # None where acceptance is not reported
    round_ms: float | None
    stage_ms: dict[str, float]  # per round; empty where stages are not reported
    first_token_ms: float
    mean_budget: float | None
    identical: int  # outputs equal to those of `ar` with the same seed
    comparable: int  # outputs that were compared


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """A row of each prompt set and case, in the order they were measured."""
    groups: dict[str, dict[str, list[Sample]]] = {}
    for sample in sorted(samples, key=lambda s: s.case != BASELINE):
        groups.setdefault(sample.source, {}).setdefault(sample.case, []).append(sample)
    return [_row(source, case, own, cases[BASELINE]) for source, cases in groups.items() for case, own in cases.items()]


def _row(source: str, case: str, samples: list[Sample], baseline: list[Sample]) -> Row:
    own, base = _by_prompt(samples, lambda o: o.token_s or None), _by_prompt(baseline, lambda o: o.token_s or None)
    common = [prompt for prompt in own if prompt in base]
    outputs = {(s.prompt, s.repeat): s.outcome.token_ids for s in baseline}
    compared = [s for s in samples if s.outcome.token_ids is not None]
    rounds = [o for s in samples if (o := s.outcome).acceptance_lengths]
    budgets = [s.outcome.mean_budget for s in samples if s.outcome.mean_budget is not None]
    # Mean over mean of paired figures [prompts].
    above, below = (np.array([times[p] for p in common] or [float("nan")]) for times in (base, own))
    draws = np.random.default_rng(0).integers(0, len(above), (RESAMPLES, len(above)))
    low, high = np.percentile(above[draws].mean(1) / below[draws].mean(1), TAILS)
    speedup = Spread(float(above.mean() / below.mean()), float(low), float(high))
    stages = []  # milliseconds per round
    for o in rounds:
        if o.stage_s:
            times = [o.stage_s[stage] for stage in ROUND_STAGES]
            times.append(max(o.decode_s - sum(times), 0.0))
            stages.append([1000 * s / len(o.acceptance_lengths or ()) for s in times])
    return Row(
        source=source,
        case=case,
        prompts=len(own),
        tokens_per_s=quartiles([1 / seconds for seconds in own.values()]),
        speedup=speedup,
        tau=fmean(_by_prompt(samples, lambda o: fmean(o.acceptance_lengths or [1])).values()) if rounds else None,
        round_ms=median(1000 * o.decode_s / len(o.acceptance_lengths or ()) for o in rounds) if rounds else None,
        stage_ms=dict(zip(STAGES, map(median, zip(*stages, strict=True)), strict=True)) if stages else {},
        first_token_ms=median(1000 * s.outcome.first_token_s for s in samples),
        mean_budget=fmean(budgets) if budgets else None,
        identical=sum(s.outcome.token_ids == outputs.get((s.prompt, s.repeat)) for s in compared),
        comparable=len(compared),
    )


def _by_prompt(samples: Sequence[Sample], figure: Callable[[Outcome], float | None]) -> dict[str, float]:
    """The median over repeats of a figure; prompts without one are left out."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        if (value := figure(sample.outcome)) is not None:
            found.setdefault(sample.prompt, []).append(value)
    return {prompt: median(values) for prompt, values in found.items()}


def quartiles(values: Sequence[float]) -> Spread:
    low, middle, high = np.percentile(values or [float("nan")], [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def text(result: BenchResult) -> str:
    """Tables in Markdown, the legend, and what belongs to the figures."""
    rows, lines = summarize(result.samples), list[str]()
    for source in dict.fromkeys(row.source for row in rows):
        mine, cells = [row for row in rows if row.source == source], []
        for row in mine:
            rate, speedup = row.tokens_per_s, row.speedup
            optional = ((row.tau, 2), (row.round_ms, 2), (row.mean_budget, 1))
            line = [row.case, f"{rate.value:.0f} [{rate.low:.0f}, {rate.high:.0f}]"]
            line += [f"{speedup.value:.2f}× [{speedup.low:.2f}, {speedup.high:.2f}]"]
            line += ["–" if value is None else f"{value:.{digits}f}" for value, digits in optional]
            same = f"{row.identical}/{row.comparable}" if row.comparable else "–"
            cells.append([*line, f"{row.first_token_ms:.1f}", same])
        lines += [f"**{source}** ({max(row.prompts for row in mine)} prompts)", "", *table(_HEAD, cells), ""]
        staged = [[row.case, *(f"{row.stage_ms[s]:.3f}" for s in STAGES)] for row in mine if row.stage_ms]
        if staged:
            lines += ["Milliseconds per round by stage:", "", *table(["case", *STAGES], staged), ""]
    settings, engine, env = result.settings, result.engine, result.environment
    notes = [
        f"{engine['name']}, {engine['backend']} {engine['precision']}, threads {engine['threads']}; at most "
        f"{settings.max_tokens} new tokens, temperature {settings.temperature:g}.",
        f"{env['machine']}; ddtree-trt {env['version']}; {env['started']}, load {env['load_1min']}.",
    ]
    if warning := busy_warning(env["load_1min"], env["cores"]):
        notes.append(warning)
    if result.skipped:
        notes.append(f"{len(result.skipped)} prompts were too long and left out.")
    return "\n".join([*lines, LEGEND, "", *(f"- {note}" for note in notes), ""])


_HEAD = ["case", "tokens/s", "speedup", "τ", "ms/round", "budget", "first token ms", "same as ar"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, its columns aligned for a terminal."""
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        for first, *others in (cells[0], rule, *cells[1:])
    ]
    return ["| " + " | ".join(row) + " |" for row in cells]


def draw(result: BenchResult, path: Path) -> None:
    """Write a picture, all prompt sets together: speedup of each case, milliseconds of a round by stage, and τ and
    speedup against the tree budget."""
    from matplotlib.figure import Figure

    rows = summarize([replace(sample, source="all") for sample in result.samples])
    figure = Figure(figsize=(13, 4), layout="constrained")
    speed, stage, budget = figure.subplots(1, 3)
    for place, row in enumerate(reversed(rows)):
        s, start = row.speedup, 0.0
        speed.barh(place, s.value, xerr=[[s.value - s.low], [s.high - s.value]], color="C0")
        for number, name in enumerate(STAGES):
            width = row.stage_ms.get(name, 0.0)
            stage.barh(place, width, left=start, color=f"C{number}", label=None if place else name)
            start += width
    for axis, title in ((speed, "speedup over ar (95 % interval)"), (stage, "milliseconds of a round by stage")):
        axis.set_yticks(range(len(rows)), [row.case for row in reversed(rows)])
        axis.set_title(title)
    fixed = [(int(size), row) for row in rows if (size := row.case.rpartition("@")[2]).isdigit()]
    budget.plot([size for size, _ in fixed], [row.tau for _, row in fixed], "o-", label="tokens per round (τ)")
    budget.plot([size for size, _ in fixed], [row.speedup.value for _, row in fixed], "o-", label="speedup over ar")
    budget.set_title("against the tree budget")
    for axis in (stage, budget):
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
