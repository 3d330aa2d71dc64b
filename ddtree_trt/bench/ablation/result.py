"""The result of an ablation: rows of figures by question, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.bench.environment import EngineInfo, Environment
from ddtree_trt.bench.reporting.markdown import Table, markdown_table

SCHEMA_VERSION = 1
SUBSTAGES = ("copy", "heap", "visibility")


@dataclass(frozen=True)
class TreeRow:
    """One way of making trees, replayed over all texts at temperature 0."""

    policy: str
    candidates: str  # "marginals" or "conditionals"
    nodes: int  # most nodes of a tree
    depth: int  # most tokens of a path
    width: int | None  # of beam, the best one; of eagle2, the nodes it expands; None of others
    tau: float  # tokens per round, mean over texts
    mean_nodes: float  # of the trees
    expected: float  # tokens per round that the drafter's probabilities promise
    histogram: dict[int, int]  # rounds by the tokens they committed


@dataclass(frozen=True)
class TimeRow:
    """One case, decoded."""

    case: str
    temperature: float
    tau: float
    tokens_per_s: float  # median over prompts
    token_ms: float
    speedup: float  # over `ar` at the same temperature
    stage_ms: dict[str, float]  # per round, median


@dataclass(frozen=True)
class BuildRow:
    """The parts of the stage `tree_build` and of the mask, medians over recorded drafts."""

    nodes: int
    copy_ms: float  # the draft's candidates out of the engine's buffers
    heap_ms: float
    visibility_ms: float  # which node sees which, of the compiled tree


@dataclass(frozen=True)
class AblationResult:
    """Everything an ablation found, and its settings."""

    settings: AblationSettings
    engine: EngineInfo
    environment: Environment
    texts: int
    tokens: int  # of the texts, after their prompts
    draft_length: int  # L
    notes: tuple[str, ...]
    policies: tuple[TreeRow, ...]  # every policy at every number of nodes
    depths: tuple[TreeRow, ...]  # the heap at every depth and number of nodes
    conditionals: tuple[TreeRow, ...]  # the heap over marginals and conditionals; empty where the drafter has only one
    builds: tuple[BuildRow, ...]
    budgets: tuple[TimeRow, ...]  # every number of nodes at temperature 0
    temperatures: tuple[TimeRow, ...]  # the fastest of them at every temperature
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


def tables(result: AblationResult) -> list[tuple[str, Table]]:
    """(heading, table) of every question that has an answer."""
    heap = [row for row in result.policies if row.policy == "heap"]
    found = [
        ("τ by policy, equal nodes", _pivot(result.policies, lambda row: row.policy, "nodes")),
        (
            "τ of the heap, at most so deep and so large",
            _pivot(result.depths, lambda row: f"depth {row.depth}", "nodes"),
        ),
        ("τ of the heap by candidates", _pivot(result.conditionals, lambda r: r.candidates, "nodes")),
        ("rounds of the heap by tokens committed, %", _histograms(heap)),
        ("parts of tree_build and the mask, ms", _builds(result.builds)),
        ("decoded at temperature 0", _times(result.budgets)),
        ("decoded at other temperatures", _times(result.temperatures)),
    ]
    return [(heading, table) for heading, table in found if table[1]]


def _pivot(rows: Sequence[TreeRow], column: Callable[[TreeRow], str], corner: str) -> Table:
    """τ by number of nodes, a column for each value of `column`, with the width behind it where it was chosen."""
    names = list(dict.fromkeys(column(row) for row in rows))
    cells = {(row.nodes, column(row)): _tau(row) for row in rows}
    sizes = sorted({row.nodes for row in rows})
    return [corner, *names], [[str(n), *(cells.get((n, name), "–") for name in names)] for n in sizes]


def _tau(row: TreeRow) -> str:
    return f"{row.tau:.2f}" + (f" (width {row.width})" if row.policy == "beam" else "")


def _histograms(rows: Sequence[TreeRow]) -> Table:
    longest = max((max(row.histogram, default=0) for row in rows), default=0)
    body = []
    for row in rows:
        total = sum(row.histogram.values())
        shares = [f"{100 * row.histogram.get(n, 0) / total:.0f}" for n in range(1, longest + 1)]
        body.append([str(row.nodes), *shares])
    return ["nodes", *map(str, range(1, longest + 1))], body


def _builds(rows: Sequence[BuildRow]) -> Table:
    body = [[str(r.nodes), *(f"{ms:.4f}" for ms in (r.copy_ms, r.heap_ms, r.visibility_ms))] for r in rows]
    return ["nodes", *SUBSTAGES], body


def _times(rows: Sequence[TimeRow]) -> Table:
    body = [
        [
            f"{r.temperature:g}",
            r.case,
            f"{r.tau:.2f}",
            f"{r.token_ms:.3f}",
            f"{r.tokens_per_s:.0f}",
            f"{r.speedup:.2f}×",
            f"{r.stage_ms.get('draft', 0):.2f}",
            f"{r.stage_ms.get('tree_build', 0):.3f}",
            f"{r.stage_ms.get('verify', 0):.2f}",
        ]
        for r in rows
    ]
    return ["T", "case", "τ", "ms/token", "tokens/s", "speedup", "draft ms", "tree_build ms", "verify ms"], body


LEGEND = (
    "τ: tokens committed per round, bonus included, mean over texts, by replay of drafts behind the tokens of the "
    "target's own greedy texts: exactly the rounds that decoding takes. beam: the best of its widths. eagle2 expands "
    "10 nodes per depth. Times are medians over prompts."
)


def lines(result: AblationResult) -> list[str]:
    """Sentences to be read with the tables."""
    e, env = result.engine, result.environment
    threads = f"{e.threads} thread{'s' * (e.threads > 1)}"
    where = ", ".join([env.machine, *env.gpus])
    found = [
        LEGEND,
        f"{e.name}, {e.backend} {e.precision}, {threads}; {result.texts} texts of {result.tokens} tokens in "
        f"all; the drafter drafts {result.draft_length} tokens.",
        f"{where}; ddtree-trt {env.product_version}; {env.started}, load {env.load_1min}.",
    ]
    if env.busy and result.budgets:
        found.append(f"The machine was busy: load {env.load_1min} on {env.cores} cores. Do not trust times.")
    return [*found, *result.notes]


def markdown(result: AblationResult) -> str:
    """Every table, and the sentences."""
    body: list[str] = []
    for heading, table in tables(result):
        body += [f"**{heading}**", "", *markdown_table(table), ""]
    return "\n".join([*body, *lines(result)]) + "\n"
