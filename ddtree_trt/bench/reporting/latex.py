"""A result as a LaTeX table like the paper's. Needs booktabs."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_trt.bench.paper_datasets import PAPER_SETS, title
from ddtree_trt.bench.reporting.summary import AUTO, CHAIN, Row, best_fixed, summarize
from ddtree_trt.bench.result import BenchResult

_TAU = "Speedup & $\\tau$"


def latex(results: Sequence[BenchResult]) -> str:
    """The paper's table: a line per temperature and prompt set; per model the speedup and τ of DFlash, of DDTree at its
    best fixed budget, and of DDTree with automatic budgets where measured."""
    cells: dict[tuple[float, str, int, str], Row] = {}
    for model, result in enumerate(results):
        rows = summarize(result)
        for source, temperature in dict.fromkeys((r.source, r.temperature) for r in rows):
            group = [r for r in rows if (r.source, r.temperature) == (source, temperature)]
            for method, row in _paper_methods(group).items():
                cells[temperature, source, model, method] = row
    methods = list(dict.fromkeys(key[3] for key in cells))
    sources = sorted({key[1] for key in cells}, key=_source_order)
    models = [result.engine.name for result in results]
    return "\n".join(_latex_lines(cells, models, methods, sources)) + "\n"


def _paper_methods(rows: Sequence[Row]) -> dict[str, Row]:
    own = {r.case.label: r for r in rows if not r.case.peer}
    found = {"DFlash": own.get(CHAIN), "DDTree": best_fixed(rows), "DDTree (auto)": own.get(AUTO)}
    return {name: row for name, row in found.items() if row is not None}


def _source_order(source: str) -> tuple[int, str]:
    names = list(PAPER_SETS)
    return (names.index(source) if source in names else len(names), source)


def _latex_lines(
    cells: dict[tuple[float, str, int, str], Row], models: Sequence[str], methods: Sequence[str], sources: Sequence[str]
) -> list[str]:
    width = 2 * len(methods)
    columns = 1 + width * len(models)
    head = [f"\\multicolumn{{{width}}}{{c}}{{{_escape(name)}}}" for name in models]
    names = [f"\\multicolumn{{2}}{{c}}{{{_escape(name)}}}" for name in methods] * len(models)
    rules = [f"\\cmidrule(lr){{{2 + i * width}-{1 + (i + 1) * width}}}" for i in range(len(models))]
    pairs = [f"\\cmidrule(lr){{{2 + 2 * i}-{3 + 2 * i}}}" for i in range(len(names))]
    lines = [
        f"\\begin{{tabular}}{{l{'r' * (columns - 1)}}}",
        "\\toprule",
        f" & {' & '.join(head)} \\\\",
        "".join(rules),
        f" & {' & '.join(names)} \\\\",
        "".join(pairs),
        f" & {' & '.join([_TAU] * len(names))} \\\\",
    ]
    for temperature in sorted({key[0] for key in cells}):
        lines += ["\\midrule", f"\\multicolumn{{{columns}}}{{l}}{{\\emph{{Temperature {temperature:g}}}}} \\\\"]
        for source in sources:
            row = [_escape(title(source))]
            for model in range(len(models)):
                row += _latex_cells([cells.get((temperature, source, model, method)) for method in methods])
            lines.append(f"{' & '.join(row)} \\\\")
    return [*lines, "\\bottomrule", "\\end{tabular}"]


def _latex_cells(rows: Sequence[Row | None]) -> list[str]:
    """Speedup and τ of each method, the best of each in bold."""
    speedups = [None if r is None else f"{r.speedup.value:.2f}" for r in rows]
    taus = [None if r is None or r.tau is None else f"{r.tau.value:.2f}" for r in rows]
    return [text for pair in zip(_bold(speedups, "$\\times$"), _bold(taus, ""), strict=True) for text in pair]


def _bold(values: Sequence[str | None], unit: str) -> list[str]:
    best = max((float(v) for v in values if v is not None), default=None)
    several = sum(v is not None for v in values) > 1
    return [
        "--" if v is None else f"\\textbf{{{v}{unit}}}" if several and float(v) == best else f"{v}{unit}"
        for v in values
    ]


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text)
