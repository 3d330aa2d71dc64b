"""A measurement under load as a picture: throughput and percentiles of latencies against load, a colour each method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_trt.bench.load.result import LoadResult, Percentiles, Run
from ddtree_trt.bench.load.settings import BASELINE
from ddtree_trt.bench.reporting.plots import BLUE, DPI, GREEN, GREY, ORANGE, PURPLE, RED, WIDTH_IN, sign, style

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)
_LINES = {"p50": "-", "p90": "--", "p99": ":"}
_LATENCIES: tuple[tuple[str, Callable[[Run], Percentiles | None]], ...] = (
    ("Time to first token, ms", lambda run: run.first_token_s),
    ("Time per output token, ms", lambda run: run.per_token_s),
    ("Whole request, ms", lambda run: run.whole_s),
)


def plot_load(result: LoadResult, directory: Path) -> list[Path]:
    """Write a picture for the closed loop and one for the open loop, as far as they were measured; returns their
    paths."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(style()):
        for name, label, runs in (
            ("load-closed.png", "concurrent requests", [r for r in result.runs if r.level.rate is None]),
            ("load-open.png", "requests per second, offered", [r for r in result.runs if r.level.rate is not None]),
        ):
            if runs:
                figure = draw(result, runs, label)
                figure.savefig(directory / name, dpi=DPI, metadata={"Software": None})  # the same for the same result
                written.append(directory / name)
    return written


def draw(result: LoadResult, runs: list[Run], label: str) -> Any:
    """A figure of four panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, 5.8), layout="constrained")
    throughput, *others = figure.subplots(2, 2).ravel().tolist()
    colours = dict(zip((m for m in result.settings.methods if m != BASELINE), _COLOURS * 9, strict=False))
    colours[BASELINE] = GREY
    for method in result.settings.methods:
        mine = sorted((r for r in runs if r.method == method), key=lambda r: r.level.load)
        loads = [r.level.load for r in mine]
        throughput.plot(loads, [r.tokens_per_s for r in mine], "o-", color=colours[method], label=method)
        for axis, (_, read) in zip(others, _LATENCIES, strict=True):
            for name, line in _LINES.items():
                times = [None if (p := read(r)) is None else 1000 * getattr(p, name) for r in mine]
                label_of = f"{method} {name}"
                axis.plot(loads, times, marker="o", linestyle=line, color=colours[method], label=label_of)
    throughput.set_title("Output tokens per second")
    throughput.set_ylim(bottom=0)
    for axis, (title, _) in zip(others, _LATENCIES, strict=True):
        axis.set_title(title)
        axis.set_yscale("log")
    loads = sorted({r.level.load for r in runs})
    for axis in (throughput, *others):
        axis.set_xscale("log")
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.minorticks_off()
        axis.set_xlabel(label)
    throughput.legend()
    others[0].legend(fontsize=7.5, handlelength=3.5)
    environment = result.environment
    sign(figure, f"{result.model} · client on {environment.machine}, load {environment.load_1min:g}")
    return figure
