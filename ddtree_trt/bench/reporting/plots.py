"""A result as pictures: speedup by method, acceptance and speedup by budget, time by stage, acceptance by depth and by
length."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.bench.environment import EngineInfo, Environment
from ddtree_trt.bench.paper_datasets import title
from ddtree_trt.bench.reporting.summary import AUTO, CHAIN, Row, best_fixed, summarize
from ddtree_trt.bench.result import BenchResult
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.runtime.decoding.methods import BASELINES, DDTREE
from ddtree_trt.runtime.stats import ROUND_STAGES

# Okabe and Ito's colours, which stay apart for colour-blind readers.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"),
)
GREY, INK = "#8C8C8C", "#333333"
_STAGE_COLOURS = dict(zip((*ROUND_STAGES, "other"), (ORANGE, GREEN, SKY, BLUE, PURPLE, GREY), strict=True))
WIDTH_IN, DPI = 8.3, 200


def plot_all(result: BenchResult, directory: Path) -> list[Path]:
    """Write every picture that the result has data for; returns their paths. Raises MissingDependency."""
    require_matplotlib()
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    pictures: tuple[tuple[str, Callable[[BenchResult], Any | None]], ...] = (
        ("speedup.png", speedup),
        ("budget.png", budget),
        ("stages.png", stages),
        ("acceptance.png", acceptance),
    )
    written = []
    with matplotlib.rc_context(style()):
        for name, draw in pictures:
            figure = draw(result)
            if figure is not None:
                # No version and date inside: the same result gives the same file.
                figure.savefig(directory / name, dpi=DPI, metadata={"Software": None})
                written.append(directory / name)
    return written


def require_matplotlib() -> None:
    """Raises MissingDependency where matplotlib is not installed. Called before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(f"pictures need matplotlib, which is not installed; {install_with('bench')}")


def style() -> Any:
    """Settings of matplotlib that all pictures share."""
    return {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#E3E3E3",
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }


def _figure(height_in: float, columns: int, result: BenchResult) -> tuple[Any, list[Any]]:
    """(figure, its panels, in one row); engine and machine of the run are written below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0].tolist()
    note = origin(result.engine, result.parts[0].environment)
    forced = result.settings.forced_acceptance
    note += f" · forced acceptance {forced}" if forced is not None else ""
    sign(figure, note)
    return figure, axes


def origin(engine: EngineInfo, environment: Environment) -> str:
    """The engine and the machine that a picture is of."""
    where = ", ".join([environment.machine, *environment.gpus])
    return f"{engine.name}, {engine.backend} {engine.precision} · {where}"


def sign(figure: Any, note: str) -> None:
    """Write a note below a figure."""
    figure.supxlabel(note, fontsize=7.5, color=GREY, x=0.99, ha="right")


def speedup(result: BenchResult) -> Any | None:
    """Bars of speedup over `ar` with their interval, by prompt set and temperature."""
    groups: dict[str, list[tuple[str, Row]]] = {}
    rows = summarize(result)
    for source, temperature in dict.fromkeys((r.source, r.temperature) for r in rows):
        group = [r for r in rows if (r.source, r.temperature) == (source, temperature)]
        groups[f"{title(source)}\nT = {temperature:g}"] = _methods(group)
    labels = list(dict.fromkeys(label for bars in groups.values() for label, _ in bars))
    if not labels:
        return None
    thick = 0.8 / len(labels)
    figure, (axis,) = _figure(max(2.4, 0.6 + 0.26 * len(labels) * len(groups) + 0.25 * len(groups)), 1, result)
    colours = _colours(labels)
    for place, bars in enumerate(groups.values()):
        for label, row in bars:
            y = place + (labels.index(label) - (len(labels) - 1) / 2) * thick
            s = row.speedup
            error = [[max(s.value - s.low, 0)], [max(s.high - s.value, 0)]]
            axis.barh(y, s.value, 0.88 * thick, color=colours[label], xerr=error, error_kw={"lw": 1, "ecolor": INK})
            text = f"{s.value:.2f}×" + _best_case(label, row)
            axis.annotate(
                text,
                (max(s.high, s.value), y),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the line at 1
            )
    for label in labels:
        axis.barh(0, 0, color=colours[label], label=label)
    axis.axvline(1, color=INK, lw=1, ls="--")
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.16)
    axis.set_xlabel("speedup over autoregressive decoding on the same engine (95 % interval)")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(labels), 4))
    return figure


def _best_case(label: str, row: Row) -> str:
    """The case behind a bar that shows the best of several, in parentheses; empty for other bars."""
    if not label.endswith(("best", "best budget")):
        return ""
    facts = [row.case.method] if row.case.peer else []
    facts += [f"budget {row.case.budget}"] if row.case.budget else []
    return f"  ({', '.join(facts)})"


def _methods(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """(label, row) of each bar: every method at its best budget, and the best case of every peer."""
    own = {r.case.label: r for r in rows if not r.case.peer}
    found = [("DFlash", own.get(CHAIN)), ("DDTree, best budget", best_fixed(rows))]
    found.append(("DDTree, auto", own.get(AUTO)))
    shown = {*(method.name for method in BASELINES), DDTREE.name}
    found += [(r.case.method, r) for r in rows if not r.case.peer and r.case.method not in shown]
    for peer in dict.fromkeys(r.case.peer for r in rows if r.case.peer):
        best = max((r for r in rows if r.case.peer == peer), key=lambda r: r.speedup.value)
        found.append((f"{peer}, best", best))
    return [(label, row) for label, row in found if row is not None]


def _colours(labels: Sequence[str]) -> dict[str, str]:
    fixed = {"DFlash": ORANGE, "DDTree, best budget": SKY, "DDTree, auto": BLUE}
    spare = iter((GREEN, PURPLE, RED, YELLOW, GREY, INK) * (1 + len(labels) // 6))
    return {label: fixed.get(label) or next(spare) for label in labels}


def budget(result: BenchResult) -> Any | None:
    """τ and speedup against the tree budget, all prompt sets together; None with fewer than two budgets."""
    rows = summarize(result, pooled=True)
    temperatures = list(dict.fromkeys(r.temperature for r in rows))
    fixed = {t: [r for r in _fixed(rows) if r.temperature == t] for t in temperatures}
    if max(map(len, fixed.values()), default=0) < 2:
        return None
    figure, (left, right) = _figure(3.7, 2, result)
    figure.get_layout_engine().set(wspace=0.06)
    ticks = sorted({int(r.case.budget or 0) for points in fixed.values() for r in points})
    for colour, temperature in zip((BLUE, RED, GREEN, PURPLE), temperatures, strict=False):
        points = fixed[temperature]
        own = {r.case.label: r for r in rows if not r.case.peer and r.temperature == temperature}
        for axis, value in ((left, _tau), (right, lambda r: r.speedup.value)):
            x, y = [int(r.case.budget or 0) for r in points], [value(r) for r in points]
            axis.plot(x, y, "o-", color=colour, label=f"DDTree, T = {temperature:g}")
            if chain := own.get(CHAIN):
                axis.axhline(value(chain), color=colour, ls=":", lw=1.4, label=f"DFlash, T = {temperature:g}")
            if (auto := own.get(AUTO)) and auto.mean_budget:
                axis.plot(
                    *(auto.mean_budget, value(auto)), "*", ms=13, color=colour, mec="white", zorder=3, clip_on=False,
                    label=f"auto, T = {temperature:g}",
                )  # fmt: skip
    for axis, label in ((left, "tokens per round (τ)"), (right, "speedup over autoregressive (×)")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_xlabel("tree budget (draft nodes per round)")
        axis.set_ylabel(label)
        axis.margins(x=0.07, y=0.1)  # room for a star on the border
        axis.set_ylim(bottom=0)
    right.axhline(1, color=INK, lw=1, ls="--")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8.5)
    return figure


def _fixed(rows: Sequence[Row]) -> list[Row]:
    own = [
        r
        for r in rows
        if r.case.method == DDTREE.name and not r.case.peer and isinstance(r.case.budget, int) and not r.case.device
    ]
    return sorted(own, key=lambda r: int(r.case.budget or 0))


def _tau(row: Row) -> float:
    return row.tau.value if row.tau is not None else float("nan")


def stages(result: BenchResult) -> Any | None:
    """Milliseconds of a round by stage, stacked, at the first temperature and all prompt sets together."""
    rows = _first_temperature(result)
    own = [r for r in rows if r.stage_ms and not r.case.peer]
    peers = {(r.case.method, r.case.budget): r for r in rows if r.stage_ms and r.case.peer}
    bars = [bar for row in own for bar in (row, peers.get((row.case.method, row.case.budget))) if bar is not None]
    if not bars:
        return None
    figure, (axis,) = _figure(1.2 + 0.3 * len(bars), 1, result)
    names = [f"{r.case.method} {'' if r.case.budget is None else r.case.budget}".strip() for r in bars]
    texts = [f"published code: {n}" if r.case.peer else n for n, r in zip(names, bars, strict=True)]
    for y, row in enumerate(bars):
        start = 0.0
        for stage, colour in _STAGE_COLOURS.items():
            axis.barh(y, row.stage_ms[stage], 0.72, left=start, color=_pale(colour) if row.case.peer else colour)
            start += row.stage_ms[stage]
        axis.annotate(f"{start:.2f}", (start, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    for stage, colour in _STAGE_COLOURS.items():
        axis.barh(0, 0, color=colour, label=stage)
    axis.set_yticks(range(len(bars)), texts)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.08)
    axis.set_xlabel(f"milliseconds per round by stage, medians over prompts, T = {rows[0].temperature:g}")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_STAGE_COLOURS), columnspacing=1.2)
    return figure


def _pale(colour: str) -> tuple[float, ...]:
    """A colour half way to white."""
    from matplotlib.colors import to_rgb

    return tuple(0.5 + 0.5 * part for part in to_rgb(colour))


def acceptance(result: BenchResult) -> Any | None:
    """At the first temperature: the share of rounds that accepted a draft token at each depth, per case, and beside it
    the share that committed each number of tokens, for `dflash`, the best budget and the automatic one."""
    rows = [r for r in _first_temperature(result) if r.acceptance_by_depth and not r.case.peer]
    if not rows:
        return None
    figure, (left, right) = _figure(3.6, 2, result)
    figure.get_layout_engine().set(wspace=0.05)
    styles = _acceptance_styles([r.case.label for r in _fixed(rows)])
    for row in rows:
        depths = range(1, 1 + len(row.acceptance_by_depth))
        style = styles.get(row.case.label, {"color": PURPLE, "ls": "-.", "marker": "o"})
        left.plot(depths, [100 * a for a in row.acceptance_by_depth], label=row.case.label, **style)
    left.set_xlabel(f"depth in the tree, T = {rows[0].temperature:g}")
    left.set_ylabel("rounds that accepted this deep (%)")
    left.set_ylim(0, 103)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8.5)
    compared = _histogram_rows(rows)
    for place, row in enumerate(compared):
        shares = length_shares(row.acceptance_by_depth)
        thick = 0.84 / len(compared)
        at = [k + (place - (len(compared) - 1) / 2) * thick for k in range(1, 1 + len(shares))]
        right.bar(
            at, [100 * share for share in shares], thick, color=styles.get(row.case.label, {}).get("color", PURPLE)
        )
    right.set_xlabel("tokens committed in a round")
    right.set_ylabel("rounds (%)")
    right.grid(axis="x", visible=False)
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _acceptance_styles(budgets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Line styles by case: fixed budgets from green to dark violet, each with a marker of its own."""
    from matplotlib import colormaps

    shades = [colormaps["viridis"](0.82 * (1 - i / max(len(budgets) - 1, 1))) for i in range(len(budgets))]
    markers = ("s^vDPX<>" * (1 + len(budgets) // 8))[: len(budgets)]
    fixed = {
        label: {"color": shade, "ls": "-", "marker": marker}
        for label, shade, marker in zip(budgets, shades, markers, strict=True)
    }
    auto = {"color": RED, "ls": "-", "marker": "*", "ms": 9, "zorder": 3}
    return {CHAIN: {"color": ORANGE, "ls": "--", "marker": "o"}, AUTO: auto, **fixed}


def _histogram_rows(rows: Sequence[Row]) -> list[Row]:
    """The chain, the best fixed budget and the automatic one, as far as they were measured; else every row."""
    best = best_fixed(rows)
    wanted = {CHAIN, AUTO, best.case.label if best else CHAIN}
    return [r for r in rows if r.case.label in wanted] or list(rows)


def length_shares(by_depth: Sequence[float]) -> list[float]:
    """Shares of rounds that committed 1, 2, … tokens, from the shares that accepted a draft token at depth 1, 2, …"""
    above = [1.0, *by_depth, 0.0]
    return [more - fewer for more, fewer in itertools.pairwise(above)]


def _first_temperature(result: BenchResult) -> list[Row]:
    rows = summarize(result, pooled=True)
    return [r for r in rows if r.temperature == rows[0].temperature]
