"""Figures of a measurement under load, as a table and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt.bench.report import require_matplotlib, table
from workbench.load.client import Sent

PERCENTILES = (50, 90, 99)
LATENCIES = ("first_token_s", "per_token_s", "gap_s", "whole_s")
LEGEND = (
    "p50 / p90 / p99 of the answered requests, as their clients saw them; a request of an open loop counts from the "
    "time it was due. τ: tokens of a round that verified drafts."
)
_FIGURES = "tokens/s,over ar,requests/s,first token ms,per token ms,longest gap ms,whole ms,τ,answered".split(",")


@dataclass(frozen=True)
class Level:
    """How much load: a number of clients that always have a request under way (closed loop), or a rate at which
    requests arrive, whether or not others have been answered (open loop)."""

    concurrency: int | None = None
    rate: float | None = None  # requests per second

    @property
    def load(self) -> float:
        return float(self.concurrency or self.rate or 0)

    def __str__(self) -> str:
        return f"{self.concurrency} concurrent" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class Run:
    """One method at one level."""

    level: Level
    method: str
    seconds: float  # from the first request's time to the last answer's end
    sent: tuple[Sent, ...]
    chunk_s: float | None = None  # what a chunk of a long prompt took alone, where such prompts were sent beside these

    @property
    def answered(self) -> list[Sent]:
        return [s for s in self.sent if s.error is None]

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.answered) / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a round that verified drafts, the bonus token included; None where the server drafted none, or
        says nothing of it."""
        rounds = sum(s.rounds for s in self.answered)
        return 1 + sum(s.accepted for s in self.answered) / rounds if rounds else None

    @property
    def longest_gap_s(self) -> float:
        """Of all streams."""
        return max((s.gap_s for s in self.answered if s.gap_s is not None), default=0.0)

    @property
    def errors(self) -> dict[str, int]:
        """The errors, by how many requests had each."""
        return dict(Counter(s.error for s in self.sent if s.error is not None))

    def latency(self, name: str) -> tuple[float, ...] | None:
        """p50, p90 and p99 of one of LATENCIES, in seconds; None where no answer has it."""
        known = [value for s in self.answered if (value := getattr(s, name)) is not None]
        return tuple(np.percentile(known, PERCENTILES).tolist()) if known else None


@dataclass(frozen=True)
class LoadResult:
    """A whole measurement."""

    url: str
    model: str
    environment: Mapping[str, Any]  # of the client; the server's too where it was started here
    runs: tuple[Run, ...]


def figures(run: Run) -> dict[str, Any]:
    return {
        "level": asdict(run.level),
        "method": run.method,
        "seconds": run.seconds,
        "answered": len(run.answered),
        "errors": run.errors,
        "output_tokens_per_s": run.tokens_per_s,
        "requests_per_s": len(run.answered) / run.seconds,
        "acceptance_length": run.acceptance_length,
        "longest_gap_s": run.longest_gap_s,
        "chunk_s": run.chunk_s,
        **{name: run.latency(name) for name in LATENCIES},
    }


def text(result: LoadResult) -> str:
    """The table, and what belongs to it: the server, the machine, and the errors of each run."""
    env = result.environment
    notes = [
        f"{result.model} at {result.url}",
        f"client on {env['machine']}, load {env['load_1min']} at the end; ddtree-trt {env['version']}",
        *(
            f"{r.level}, {r.method}: beside long prompts no stream paused longer than {1000 * r.longest_gap_s:.0f} ms, "
            f"{r.longest_gap_s / r.chunk_s:.1f} times a chunk of {1000 * r.chunk_s:.0f} ms"
            for r in result.runs
            if r.chunk_s
        ),
        *(f"{r.level}, {r.method}: {count} × {error}" for r in result.runs for error, count in r.errors.items()),
    ]
    rows = table(["load", "method", *_FIGURES], _lines(result))
    return "\n".join([*rows, "", LEGEND, "", *(f"- {note}" for note in notes), ""])


def _lines(result: LoadResult) -> Iterable[list[str]]:
    baseline = {run.level: run.tokens_per_s for run in result.runs if run.method == "ar"}
    for run in result.runs:
        length, base = run.acceptance_length, baseline.get(run.level)
        yield [
            str(run.level),
            run.method,
            f"{run.tokens_per_s:.0f}",
            "–" if not base else f"{run.tokens_per_s / base:.2f}×",
            f"{len(run.answered) / run.seconds:.2f}",
            *(_milliseconds(run.latency(name), digits) for name, digits in zip(LATENCIES, (0, 2, 0, 0), strict=True)),
            "–" if length is None else f"{length:.2f}",
            f"{len(run.answered)}/{len(run.sent)}",
        ]


def _milliseconds(times: tuple[float, ...] | None, digits: int) -> str:
    return "–" if times is None else " / ".join(f"{1000 * value:.{digits}f}" for value in times)


def draw(result: LoadResult, path: Path) -> None:
    """Write a picture: throughput, and percentiles of latencies, against load; a row of panels for each loop."""
    require_matplotlib()
    from matplotlib.figure import Figure

    loops = [
        ("concurrent requests", [run for run in result.runs if run.level.rate is None]),
        ("requests per second, offered", [run for run in result.runs if run.level.rate is not None]),
    ]
    loops = [(label, runs) for label, runs in loops if runs]
    figure = Figure(figsize=(14, 4 * len(loops)), layout="constrained")
    panels = figure.subplots(len(loops), 1 + len(LATENCIES), squeeze=False)
    for (label, runs), row in zip(loops, panels, strict=True):
        for method in dict.fromkeys(run.method for run in runs):
            mine = sorted((run for run in runs if run.method == method), key=lambda run: run.level.load)
            loads = [run.level.load for run in mine]
            (line,) = row[0].plot(loads, [run.tokens_per_s for run in mine], "o-", label=method)
            for axis, name in zip(row[1:], LATENCIES, strict=True):
                for place, style in enumerate(("-", "--", ":")):
                    times = [None if (found := run.latency(name)) is None else 1000 * found[place] for run in mine]
                    axis.plot(loads, times, style, color=line.get_color(), label=f"{method} p{PERCENTILES[place]}")
        for axis, title in zip(row, ("tokens/s", *(f"{name[:-2]}, ms" for name in LATENCIES)), strict=True):
            axis.set_title(title.replace("_", " "))
            axis.set_xlabel(label)
            axis.set_xscale("log", base=2)
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
