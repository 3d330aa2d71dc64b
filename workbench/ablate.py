"""Answer what trees, depths and candidates are worth on an engine, node for node.

    python -m workbench ablate ENGINE [--budgets 16,64,256,1024] [--depths 2,4,8] [--json FILE]

Trees are compared by replay of known texts, exactly and without noise. Budgets may be larger than the engine
was built for where it has no plans: its cache then takes less text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Limits, Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.measure import Session, describe_engine, describe_environment, load_prompts
from ddtree_trt.bench.report import table
from ddtree_trt.drafters.kind import EXPANDED, LEVELS
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import AUTO, resolve_method
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.tree import NO_ROW, Bilinear, Candidates, DraftTree, Marginals
from ddtree_trt.terminal.printing import progress_bars
from workbench.drafts import Text, record
from workbench.options import PROMPTS, Json, Prompts, integers


def heap(candidates: Candidates, nodes: int, depth: int) -> DraftTree:
    """The most probable `nodes` nodes, at most `depth` deep."""
    return candidates.best_first(nodes, max_depth=depth)


def chain(candidates: Candidates, nodes: int, depth: int) -> DraftTree:
    return candidates.best_first(nodes, max_depth=depth, width=1)


def eagle2(candidates: Candidates, nodes: int, depth: int, width: int = 10) -> DraftTree:
    """At each depth the `width` most probable nodes get their `width` most probable children. Of all these the most
    probable are the tree; of equal ones the shallower, so that no node comes before its parent."""
    return _by_depth(candidates, nodes, depth, width, beam=False)


def beam(candidates: Candidates, nodes: int, depth: int, width: int = 4) -> DraftTree:
    """At each depth the `width` most probable children of the nodes of the depth above, by depth, then by weight."""
    return _by_depth(candidates, nodes, depth, width, beam=True)


def _by_depth(candidates: Candidates, nodes: int, depth: int, width: int, *, beam: bool) -> DraftTree:
    candidates.best_first(0)  # raises ValueError for candidates that cannot be used
    weights, tokens, parents, depths = [0.0], [0], [-1], [0]
    above = [(0, 0)] if candidates.token_ids.size else []  # (node, row of its children)
    while above and depths[-1] < depth and not (beam and len(weights) > nodes):
        found = candidates.child_log_probs([row for _, row in above])
        children = []
        for i, (node, _) in enumerate(above):
            for log_prob, token, row in zip(*(values[i, :width].tolist() for values in found), strict=True):
                if log_prob > -np.inf:  # rounding may leave one just above 0: a child would come before its parent
                    children.append((weights[node] + min(log_prob, 0.0), token, node, row))
        children.sort(key=lambda child: -child[0])
        below, level = [], depths[-1] + 1
        for weight, token, node, row in children[: width if beam else None]:
            weights.append(weight)
            tokens.append(token)
            parents.append(node)
            depths.append(level)
            below.append((len(weights) - 1, row))
        above = [(node, row) for node, row in below[:width] if row != NO_ROW]
    order = list(range(1, len(weights)))
    if not beam:
        order.sort(key=lambda node: -weights[node])
    order = order[:nodes]
    place = {0: 0, **{node: i for i, node in enumerate(order, 1)}}
    return DraftTree(
        np.array([tokens[n] for n in order], np.int32),
        np.array([depths[n] for n in order], np.int32),
        np.array([-1, *(place[parents[n]] for n in order)], np.int32),
        np.array([weights[n] for n in order], np.float64),
    )


HEAP, EAGLE2, BEAM, CHAIN = "heap", "eagle2", "beam", "chain"
POLICIES: Mapping[str, Callable[..., DraftTree]] = {HEAP: heap, EAGLE2: eagle2, BEAM: beam, CHAIN: chain}


def without_conditions(candidates: Candidates) -> Marginals | None:
    """The candidates as the drafter states them before it looks at the token above; None where they are not stated."""
    if not isinstance(candidates, Bilinear):
        return None
    top = candidates.unary.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(candidates.unary - top).sum(axis=1, keepdims=True))
    return Marginals((candidates.unary - total).astype(np.float32), candidates.token_ids)


@dataclass(frozen=True)
class TreeRow:
    """One way of making trees, replayed over all texts."""

    policy: str
    nodes: int  # most nodes
    depth: int  # most tokens of a path
    width: int | None  # the best one, where several are tried
    tau: float  # tokens per round, mean over texts
    expected: float  # tokens per round that the drafter's probabilities promise
    histogram: dict[int, int]  # rounds by the tokens they committed
    candidates: str = "as drafted"  # or its marginals, where the drafter states conditionals


@dataclass(frozen=True)
class Rounds:
    """The rounds of one way of making trees over all texts."""

    lengths: tuple[tuple[int, ...], ...]  # per text: tokens committed per round, bonus included
    expected: float

    @property
    def tau(self) -> float:
        return float(np.mean([np.mean(lengths) for lengths in self.lengths]))

    @property
    def histogram(self) -> dict[int, int]:
        flat = [n for lengths in self.lengths for n in lengths]
        return {n: flat.count(n) for n in sorted(set(flat))}


def replay(texts: Sequence[Text], grow: Callable[[Candidates], DraftTree]) -> Rounds:
    """The rounds that decoding these texts takes with such trees."""
    lengths, expected = [], list[float]()
    for text in texts:
        place, found = 0, list[int]()
        while place < len(text.drafts):
            tree = grow(text.drafts[place])
            found.append(len(text.path(place, tree)))
            expected.append(1 + float(np.exp(tree.log_weights).sum()))
            place += found[-1]
        if found:
            lengths.append(tuple(found))
    return Rounds(tuple(lengths), float(np.mean(expected)))


@dataclass(frozen=True)
class Questions:
    """What replays answer."""

    texts: Sequence[Text]
    budgets: tuple[int, ...]
    depths: tuple[int, ...]
    length: int  # L, the most tokens of a path
    deepest: int  # where the depth is the question
    progress: Progress = no_progress

    def policies(self) -> list[TreeRow]:
        """Every policy at every number of nodes."""
        return [self._row(p, n, self.length, "policies") for n, p in product(self.budgets, POLICIES)]

    def by_depth(self) -> list[TreeRow]:
        """The heap at every depth and number of nodes."""
        depths = sorted({*(d for d in self.depths if d < self.deepest), self.deepest})
        return [self._row(HEAP, n, d, "depths") for n, d in product(self.budgets, depths)]

    def conditionals(self) -> list[TreeRow]:
        """The heap over both where the drafter states conditionals, and the marginals they are made of."""
        texts = []
        for text in self.texts:
            stated = [plain for draft in text.drafts if (plain := without_conditions(draft)) is not None]
            if len(stated) < len(text.drafts):
                return []
            texts.append(Text(text.tokens, stated))
        asked = product((("marginals", replace(self, texts=texts)), ("conditionals", self)), self.budgets)
        return [replace(each._row(HEAP, n, self.length, kind), candidates=kind) for (kind, each), n in asked]

    def _row(self, policy: str, nodes: int, depth: int, stage: str) -> TreeRow:
        self.progress(f"replay {stage}", self.budgets.index(nodes), len(self.budgets))
        grow = partial(POLICIES[policy], nodes=nodes, depth=depth)
        tried: dict[int | None, Rounds] = {None: replay(self.texts, grow)}
        if policy == BEAM:
            widths = [1 << i for i in range(nodes.bit_length())]
            tried = {width: replay(self.texts, partial(grow, width=width)) for width in widths}
        width, best = max(tried.items(), key=lambda each: each[1].tau)
        return TreeRow(policy, nodes, depth, width, best.tau, best.expected, best.histogram)


Result = dict[str, Any]  # question → rows, and what they are of


def main(
    engine: Path,
    prompts: Prompts = PROMPTS,
    limit: Annotated[int, typer.Option(help="prompts per set, evenly spaced")] = 12,
    max_tokens: int = 128,
    budgets: str = "4,8,16,32,64,128,256,512,1024",
    depths: str = "1,2,4,8,16",
    threads: int = 0,
    output: Json = None,
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
        encoded = [session.codec.encode(prompt.opening) for prompt in load_prompts(prompts, limit)]
        fitting = [ids for ids in encoded if len(ids) + max_tokens <= limits.max_seq_len]
        if not fitting:
            raise UsageError(f"no prompt fits: with {max_tokens} new tokens each is longer than {limits.max_seq_len}")
        length, top_k = (LEVELS, EXPANDED) if drafting.drafts == "levels" else (drafting.longest_draft, sizes[-1])
        known = record(session, fitting, max_tokens, top_k, progress)
        questions = Questions(known, sizes, integers(depths), length, drafting.longest_draft, progress=progress)
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
        }
    if output is not None:
        output.write_text(json.dumps(result, indent=1, default=asdict) + "\n", encoding="utf-8")
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


def text(result: Result) -> str:
    """Every question that has an answer, as a table."""
    heap = [row for row in result["policies"] if row.policy == HEAP]
    longest = max((max(row.histogram) for row in heap), default=0)
    lengths = range(1, longest + 1)
    shares = []
    for row in heap:
        rounds = sum(row.histogram.values())
        shares.append([str(row.nodes), *(f"{100 * row.histogram.get(n, 0) / rounds:.0f}" for n in lengths)])
    tables = [
        ("τ by policy, equal nodes", _pivot(result["policies"], "policy")),
        ("τ of the heap, at most so deep", _pivot(result["depths"], "depth")),
        ("τ of the heap by candidates", _pivot(result["conditionals"], "candidates")),
        ("rounds of the heap by tokens committed, %", (["nodes", *map(str, lengths)], shares)),
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
    widths = [f" (width {row.width})" if row.policy == BEAM else "" for row in rows]
    cells = {(r.nodes, getattr(r, column)): f"{r.tau:.2f}{width}" for r, width in zip(rows, widths, strict=True)}
    sizes = sorted({row.nodes for row in rows})
    return ["nodes", *map(str, names)], [[str(n), *(cells[n, name] for name in names)] for n in sizes]
