"""An ablation as one picture of six panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.bench.ablation.policies import HEAP
from ddtree_trt.bench.ablation.result import SUBSTAGES, AblationResult, TreeRow
from ddtree_trt.bench.reporting.plots import (
    BLUE,
    DPI,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    WIDTH_IN,
    origin,
    require_matplotlib,
    sign,
    style,
)

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
_MARKS = "osD^v*"


def draw(result: AblationResult, path: Path) -> None:
    """Write the picture. Raises MissingDependency without matplotlib."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**style(), "font.size": 8.5, "axes.titlesize": 9.5, "lines.markersize": 4}):
        figure = Figure(figsize=(WIDTH_IN, 7.8), layout="constrained")
        panels = (_policies, _depths, _histogram, _speed, _temperatures, _builds)
        for axis, panel in zip(figure.subplots(3, 2).flat, panels, strict=True):
            panel(axis, result)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves
            else:
                axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes, color=INK)
        sign(figure, origin(result.engine, result.environment))
        # No version and date inside: the same result gives the same file.
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def _policies(axis: Any, result: AblationResult) -> None:
    axis.set_title("policies at equal nodes")
    _by_nodes(axis, result.policies, lambda row: row.policy)
    _by_nodes(axis, result.conditionals, lambda row: f"heap, {row.candidates}", style="--")


def _depths(axis: Any, result: AblationResult) -> None:
    axis.set_title("depth against nodes (heap)")
    _by_nodes(axis, result.depths, lambda row: f"depth ≤ {row.depth}")


def _by_nodes(axis: Any, rows: Sequence[TreeRow], label: Callable[[TreeRow], str], style: str = "-") -> None:
    """τ against nodes, a line for every label."""
    for number, name in enumerate(dict.fromkeys(map(label, rows))):
        points = [(row.nodes, row.tau) for row in rows if label(row) == name]
        axis.plot(*zip(*points, strict=True), style, marker=_MARKS[number % 6], color=_COLOURS[number % 6], label=name)
    _nodes(axis)
    axis.set_ylabel("tokens per round (τ)")
    axis.set_ylim(bottom=0)


def _nodes(axis: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_xlabel("draft nodes")


def _histogram(axis: Any, result: AblationResult) -> None:
    axis.set_title("acceptance lengths (heap)")
    rows = [row for row in result.policies if row.policy == HEAP.name]
    shown = rows if len(rows) < 4 else [rows[0], rows[len(rows) // 2], rows[-1]]
    thick = 0.8 / len(shown)
    for number, row in enumerate(shown):
        total = sum(row.histogram.values())
        places = [length + (number - (len(shown) - 1) / 2) * thick for length in row.histogram]
        heights = [100 * count / total for count in row.histogram.values()]
        axis.bar(places, heights, thick, color=_COLOURS[number], label=f"{row.nodes} nodes")
    axis.set_xlabel("tokens committed in a round")
    axis.set_ylabel("rounds (%)")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _speed(axis: Any, result: AblationResult) -> None:
    axis.set_title("speed by budget, temperature 0")
    trees = [(int(row.case.partition("@")[2]), row.speedup) for row in result.budgets if "@" in row.case]
    if trees:
        axis.plot(*zip(*trees, strict=True), "o-", color=BLUE, label="heap")
        chains = [row for row in result.budgets if "@" not in row.case and row.case != "ar"]
        for row in chains:
            axis.axhline(row.speedup, color=ORANGE, ls=":", label=row.case)
        axis.axhline(1, color=INK, lw=1, ls="--")
        _nodes(axis)
        axis.set_ylim(bottom=0)
    axis.set_ylabel("speedup over ar (×)")


def _temperatures(axis: Any, result: AblationResult) -> None:
    axis.set_title("latency against temperature")
    for number, case in enumerate(dict.fromkeys(row.case for row in result.temperatures)):
        points = [(row.temperature, row.token_ms) for row in result.temperatures if row.case == case]
        axis.plot(*zip(*points, strict=True), marker=_MARKS[number], color=_COLOURS[number], label=case)
    axis.set_xlabel("temperature")
    axis.set_ylabel("milliseconds per token")
    axis.set_ylim(bottom=0)


def _builds(axis: Any, result: AblationResult) -> None:
    axis.set_title("parts of a build")
    nodes = [row.nodes for row in result.builds]
    if nodes:
        parts = [[1000 * getattr(row, f"{name}_ms") for row in result.builds] for name in SUBSTAGES]
        axis.stackplot(nodes, *parts, labels=SUBSTAGES, colors=(SKY, GREEN, PURPLE))
        _nodes(axis)
    axis.set_ylabel("microseconds")
