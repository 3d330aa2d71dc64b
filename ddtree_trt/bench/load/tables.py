"""A measurement under load as tables of text, for the terminal and Markdown."""

from __future__ import annotations

from ddtree_trt.bench.load.result import LoadResult, Percentiles, Run
from ddtree_trt.bench.load.settings import BASELINE
from ddtree_trt.bench.reporting.markdown import Table, markdown_table

LEGEND = (
    "p50 / p90 / p99 of the answered requests, as their clients saw them; a request of an open loop counts from the "
    "time it was due. τ: tokens of a round that verified drafts."
)
_HEADER = [
    "load",
    "method",
    "tokens/s",
    "over ar",
    "requests/s",
    "first token ms",
    "per token ms",
    "whole request ms",
    "τ",
    "answered",
]


def overview(result: LoadResult) -> Table:
    """One line for each level and method."""
    return _HEADER, [_line(result, run) for run in result.runs]


def notes(result: LoadResult) -> list[str]:
    """What belongs to the figures: the server, the load, the machine, and the errors of each run."""
    s, e = result.settings, result.environment
    lines = [
        f"{result.model} at {result.url}: prompts {', '.join(s.prompts)}, at most {s.max_tokens} tokens, temperature "
        f"{s.temperature:g}, seed {s.seed}",
        f"client on {e.machine}, load {e.load_1min} at the start{' (busy)' if e.warning else ''}; "
        f"ddtree-trt {e.product_version}, {e.started}",
    ]
    for run in result.runs:
        lines += [f"{run.level}, {run.method}: {count} × {error}" for error, count in run.errors.items()]
    return lines


def markdown(result: LoadResult) -> str:
    """The result as Markdown."""
    lines = [*markdown_table(overview(result)), "", LEGEND, "", *(f"- {note}" for note in notes(result))]
    return "\n".join(lines) + "\n"


def _line(result: LoadResult, run: Run) -> list[str]:
    ratio = "–"
    if BASELINE in result.settings.methods:
        ratio = f"{run.tokens_per_s / result.at(run.level, BASELINE).tokens_per_s:.2f}×"
    length = run.acceptance_length
    return [
        str(run.level),
        run.method,
        f"{run.tokens_per_s:.0f}",
        ratio,
        f"{run.requests_per_s:.2f}",
        _milliseconds(run.first_token_s, 0),
        _milliseconds(run.per_token_s, 2),
        _milliseconds(run.whole_s, 0),
        "–" if length is None else f"{length:.2f}",
        f"{len(run.answered)}/{len(run.sent)}",
    ]


def _milliseconds(times: Percentiles | None, digits: int) -> str:
    if times is None:
        return "–"
    return " / ".join(f"{1000 * value:.{digits}f}" for value in (times.p50, times.p90, times.p99))
