"""Answer what trees, depths, candidates, budgets and temperatures are worth on an engine, node for node.

    python -m workbench ablate ENGINE [--budgets 16,64,256,1024] [--depths 2,4,8] [--json FILE] [--plot FILE.png]

Trees are compared by replay of known texts, exactly and without noise; only times are measured. Budgets may be larger
than the engine was built for where it has no plans: its cache then takes less text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Limits, Manifest, load_manifest
from ddtree_trt.bench.measure import describe_engine, describe_environment, engine_runs, measure
from ddtree_trt.bench.prompts import BenchPrompt, load_prompts
from ddtree_trt.bench.report import require_matplotlib, summarize, table
from ddtree_trt.bench.session import Session
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.drafters.kind import EXPANDED, LEVELS
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.candidates import Candidates, Marginals
from ddtree_trt.runtime.decoding.methods import AUTO, resolve_method
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.tree import best_tree, compile_tree
from ddtree_trt.terminal.printing import progress_bars
from workbench.ablate.replay import Questions, TreeRow
from workbench.ablate.trees import BEAM, HEAP
from workbench.drafts import Text, record
from workbench.options import PROMPTS, Json, Plot, Prompts, integers, numbers

BUILDS = 60  # drafts of which trees are built to measure the parts of a build
Result = dict[str, Any]  # question → rows, and what they are of


def main(
    engine: Path,
    prompts: Prompts = PROMPTS,
    limit: Annotated[int, typer.Option(help="prompts per set, evenly spaced")] = 12,
    max_tokens: int = 128,
    budgets: str = "4,8,16,32,64,128,256,512,1024",
    depths: str = "1,2,4,8,16",
    temperatures: str = "0,0.5,1,1.5",
    timed_prompts: Annotated[int, typer.Option(help="decoded for times; 0 measures none")] = 3,
    threads: int = 0,
    output: Json = None,
    plot: Plot = None,
) -> Result:
    """Answer every question for an engine.

    Raises UsageError for an engine whose drafter drafts no trees, for budgets that its plans do not take, and for
    prompts of which none fits.
    """
    manifest = load_manifest(engine)
    method, drafting = resolve_method(AUTO, manifest.drafter_kind), manifest.drafting
    if not method.branches:
        raise UsageError(
            f"{engine} has an {drafting.title}, which drafts chains; ablate compares trees: give an engine with a "
            "block drafter or an EAGLE-3 drafter"
        )
    sizes = tuple(sorted(set(integers(budgets))))
    limits = limits_for(manifest, sizes[-1])
    opened = open_engine(engine, EngineOptions(threads=threads), limits=limits)
    with progress_bars() as progress, closing(Session(engine, engine=opened)) as session:
        encoded = [(p, session.codec.encode(p.opening)) for p in load_prompts(prompts, limit)]
        fitting = [(p, ids) for p, ids in encoded if len(ids) + max_tokens <= limits.max_seq_len]
        if not fitting:
            raise UsageError(f"no prompt fits: with {max_tokens} new tokens each is longer than {limits.max_seq_len}")
        length, top_k = (LEVELS, EXPANDED) if drafting.drafts == "levels" else (drafting.longest_draft, sizes[-1])
        known = record(session, [ids for _, ids in fitting], max_tokens, top_k, progress)
        questions = Questions(known, sizes, integers(depths), length, drafting.longest_draft, progress=progress)
        settings = BenchSettings(
            engine=str(engine), methods=(method.name,), budgets=sizes, max_tokens=max_tokens, device_rounds="off",
            threads=threads,
        )  # fmt: skip
        timed = [prompt for prompt, _ in fitting[:timed_prompts]]
        at_zero = _times(session, settings, timed, (0.0,))
        trees = [row for row in at_zero if row["case"].startswith(f"{method.name}@")]
        if trees:  # the other temperatures are measured with the fastest alone
            fastest = max(trees, key=lambda row: row["tokens_per_s"])["case"]
            settings = replace(settings, budgets=(int(fastest.rpartition("@")[2]),))
        result = {
            "engine": describe_engine(session),
            "environment": describe_environment(),
            "limits": asdict(limits),
            "texts": len(known),
            "tokens": sum(len(text.tokens) for text in known),
            "draft_length": length,
            "policies": questions.policies(),
            "depths": questions.by_depth(),
            "conditionals": questions.conditionals(),
            "builds": build_times(known, sizes),
            "budgets": at_zero,
            "temperatures": _times(session, settings, timed, sorted(set(numbers(temperatures)))),
        }
    if output is not None:
        output.write_text(json.dumps(result, indent=1, default=asdict) + "\n", encoding="utf-8")
    if plot is not None:
        draw(result, plot)
    print(text(result), end="")
    return result


def limits_for(manifest: Manifest, nodes: int) -> Limits:
    """The engine's limits, with trees of so many nodes: a larger tree leaves fewer rows of the cache for text. Raises
    UsageError where the cache has too few rows, and for larger trees than an engine with plans was built for."""
    limits = manifest.limits
    if nodes <= limits.max_tree_budget:
        return limits
    larger = replace(limits, max_tree_budget=nodes)
    left = limits.cache_rows - larger.max_tokens_per_pass
    if BACKENDS[manifest.backend].plans or left < 1:
        raise UsageError(
            f"a tree of {nodes} nodes is more than the plans or the cache of this engine take, which was built for "
            f"{limits.max_tree_budget}; lower --budgets or rebuild with a larger --max-tree-budget"
        )
    return replace(larger, max_seq_len=left)


def build_times(texts: Sequence[Text], budgets: Sequence[int]) -> list[dict[str, float]]:
    """Milliseconds of the parts of `tree_build` and of the mask at every number of nodes, medians over drafts."""
    drafts = [draft for text in texts for draft in text.drafts]
    chosen = drafts[:: max(1, len(drafts) // BUILDS)][:BUILDS]
    rows = []
    for nodes in budgets if chosen else ():
        parts = [_build_ms(draft, nodes) for draft in chosen]
        copy, heap, mask = (median(column) for column in zip(*parts, strict=True))
        rows.append({"nodes": nodes, "copy_ms": copy, "heap_ms": heap, "mask_ms": mask})
    return rows


def _build_ms(candidates: Candidates, nodes: int) -> tuple[float, float, float]:
    """The candidates copied out of the engine's buffers, the heap, and which node sees which."""
    given = vars(candidates)
    if isinstance(candidates, Marginals):
        given = {name: values[:, :nodes] for name, values in given.items()}
    times = [time.perf_counter()]
    copied = type(candidates)(**{name: values.copy() for name, values in given.items()})
    times.append(time.perf_counter())
    tree = best_tree(copied, nodes)
    times.append(time.perf_counter())
    _ = compile_tree(0, tree).packed_mask  # computed for its time
    times.append(time.perf_counter())
    return 1e3 * (times[1] - times[0]), 1e3 * (times[2] - times[1]), 1e3 * (times[3] - times[2])


def _times(
    session: Session, settings: BenchSettings, prompts: Sequence[BenchPrompt], temperatures: Sequence[float]
) -> list[dict[str, Any]]:
    """Each case at each temperature, decoded."""
    rows = []
    for temperature in temperatures if prompts else ():
        chosen = replace(settings, temperature=temperature)
        result = measure(session, chosen, engine_runs(session, chosen), prompts=prompts)
        for row in summarize(result.samples, pooled=True):
            facts = {"case": row.case, "temperature": temperature, "tau": row.tau, "speedup": row.speedup.value}
            rows.append({**facts, "tokens_per_s": row.tokens_per_s.value, "stage_ms": row.stage_ms})
    return rows


def text(result: Result) -> str:
    """Every question that has an answer, as a table."""
    heap = [row for row in result["policies"] if row.policy == HEAP]
    longest = max((max(row.histogram) for row in heap), default=0)
    lengths = range(1, longest + 1)
    shares = []
    for row in heap:
        rounds = sum(row.histogram.values())
        shares.append([str(row.nodes), *(f"{100 * row.histogram.get(n, 0) / rounds:.0f}" for n in lengths)])
    times = [
        [f"{r['temperature']:g}", r["case"], f"{r['tau']:.2f}", f"{r['tokens_per_s']:.0f}", f"{r['speedup']:.2f}×"]
        for r in (*result["budgets"], *result["temperatures"])
    ]
    builds = [
        [str(r["nodes"]), *(f"{r[name]:.4f}" for name in ("copy_ms", "heap_ms", "mask_ms"))] for r in result["builds"]
    ]
    tables = [
        ("τ by policy, equal nodes", _pivot(result["policies"], "policy")),
        ("τ of the heap, at most so deep", _pivot(result["depths"], "depth")),
        ("τ of the heap by candidates", _pivot(result["conditionals"], "candidates")),
        ("rounds of the heap by tokens committed, %", (["nodes", *map(str, lengths)], shares)),
        ("parts of tree_build and the mask, ms", (["nodes", "copy", "heap", "mask"], builds)),
        ("decoded", (["T", "case", "τ", "tokens/s", "speedup"], times)),
    ]
    lines = [
        line for heading, (head, rows) in tables if rows for line in (f"**{heading}**", "", *table(head, rows), "")
    ]
    engine, env = result["engine"], result["environment"]
    lines += [
        f"- τ: tokens per round over {result['texts']} texts, {result['tokens']} tokens; beams at their best.",
        f"- {engine['name']}, {engine['backend']} {engine['precision']}; its cache takes "
        f"{result['limits']['max_seq_len']} tokens beside trees of {result['limits']['max_tree_budget']} nodes.",
        f"- {env['machine']}; ddtree-trt {env['version']}; {env['started']}, load {env['load_1min']}.",
        "",
    ]
    return "\n".join(lines)


def _pivot(rows: Sequence[TreeRow], column: str) -> tuple[list[str], list[list[str]]]:
    """τ by number of nodes, a column for each value of `column`."""
    names = list(dict.fromkeys(getattr(row, column) for row in rows))
    cells = {(row.nodes, getattr(row, column)): _tau(row) for row in rows}
    sizes = sorted({row.nodes for row in rows})
    return ["nodes", *map(str, names)], [[str(n), *(cells[n, name] for name in names)] for n in sizes]


def _tau(row: TreeRow) -> str:
    return f"{row.tau:.2f}" + (f" (width {row.width})" if row.policy == BEAM else "")


def draw(result: Result, path: Path) -> None:
    """Write a picture: τ against nodes by policy and by depth, speedup by budget."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axis, rows, column in ((left, result["policies"], "policy"), (middle, result["depths"], "depth")):
        for name in dict.fromkeys(getattr(row, column) for row in rows):
            points = [(row.nodes, row.tau) for row in rows if getattr(row, column) == name]
            axis.plot(*zip(*points, strict=True), ".-", label=f"{column} {name}")
        axis.set_title(f"τ by {column}, against nodes")
    points = [(int(r["case"].rpartition("@")[2]), r["speedup"]) for r in result["budgets"] if "@" in r["case"]]
    right.plot([nodes for nodes, _ in points], [speed for _, speed in points], ".-", label="speedup over ar")
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
