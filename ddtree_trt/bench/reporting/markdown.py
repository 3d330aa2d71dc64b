"""A result as tables of text, for the terminal and Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddtree_trt.bench.paper_datasets import title
from ddtree_trt.bench.reporting.summary import AUTO, Row, Spread, summarize
from ddtree_trt.bench.result import BenchResult
from ddtree_trt.runtime.stats import ROUND_STAGES

Table = tuple[list[str], list[list[str]]]  # header, rows

HEADER = ["case", "tokens/s", "speedup", "τ", "ms/round", "budget", "first token ms", "same as ar"]


def overview(rows: Sequence[Row]) -> Table:
    """One line per case, for rows of one prompt set and temperature."""
    body = [
        [
            row.case.label,
            _spread(row.tokens_per_s, 0),
            _spread(row.speedup, 2, "×"),
            "–" if row.tau is None else f"{row.tau.value:.2f}",
            "–" if row.round_ms is None else _spread(row.round_ms, 2),
            "–" if row.mean_budget is None else f"{row.mean_budget:.1f}",
            f"{row.first_token_ms:.1f}",
            f"{row.identical}/{row.comparable}" if row.comparable else "–",
        ]
        for row in rows
    ]
    return HEADER, body


def stages(rows: Sequence[Row]) -> Table:
    """Milliseconds per round by stage."""
    names = [*ROUND_STAGES, "other"]
    body = [[r.case.label, *(f"{r.stage_ms[s]:.3f}" for s in names), _ms(r)] for r in rows if r.stage_ms]
    return ["case", *names, "round"], body


def auto_ratios(rows: Sequence[Row]) -> Table:
    """Tokens/s of the automatic budget over those of every other case on the same prompts; empty without it."""
    others = [(r, r.auto_over) for r in rows if r.case.label != AUTO]
    body = [[r.case.label, _spread(ratio, 2, "×")] for r, ratio in others if ratio is not None]
    return ["case", f"{AUTO} over it"], body


def round_times(rows: Sequence[Row], peer: str = "ddtree-reference") -> Table:
    """Milliseconds per round beside a peer's at the same budget; empty when the two have no case in common."""
    theirs = {(r.case.method, r.case.budget): r for r in rows if r.case.peer == peer}
    body = []
    for row in rows:
        other = theirs.get((row.case.method, row.case.budget))
        if row.case.peer or other is None or row.round_ms is None or other.round_ms is None:
            continue
        ratio = row.round_ms.value / other.round_ms.value
        body.append([row.case.label, _ms(row), _ms(other), f"{ratio:.2f}×", _tau(row), _tau(other)])
    return ["case", "ms/round", f"{peer} ms/round", "ratio", "τ", f"{peer} τ"], body


def why_auto(rows: Sequence[Row]) -> list[str]:
    """A sentence for each case with automatic budgets: how often they drafted, and what they expected of it."""
    lines = []
    for row in rows:
        a = row.automatic
        if not a.rounds:
            continue
        line = f"{row.case.label} drafted in {a.drafted / a.rounds:.0%} of {a.rounds} rounds"
        if a.drafted:
            line += (
                f" (in {a.probes} to see whether it pays again), expecting {a.expected_tokens / a.drafted:.2f} tokens "
                f"in {1000 * a.expected_s / a.drafted:.2f} ms where one without a draft takes "
                f"{1000 * a.single_token_s / a.drafted:.2f} ms: {a.expected_gain:.2f}×. It got "
                f"{a.committed_tokens / a.drafted:.2f} tokens"
            )
        lines.append(f"{line}.")
    return lines


def _ms(row: Row) -> str:
    return "–" if row.round_ms is None else f"{row.round_ms.value:.2f}"


def _tau(row: Row) -> str:
    return "–" if row.tau is None else f"{row.tau.value:.2f}"


def _spread(spread: Spread, digits: int, unit: str = "") -> str:
    if math.isnan(spread.value):
        return "–"
    return f"{spread.value:.{digits}f}{unit} [{spread.low:.{digits}f}, {spread.high:.{digits}f}]"


def groups(result: BenchResult) -> list[tuple[str, list[Row]]]:
    """(heading, rows) of each prompt set and temperature."""
    found: dict[str, list[Row]] = {}
    for row in summarize(result):
        found.setdefault(f"{title(row.source)}, temperature {row.temperature:g}", []).append(row)
    return list(found.items())


def notes(result: BenchResult) -> list[str]:
    """Sentences to be read with the figures: engine, machine, software, and what was unusual."""
    s, e = result.settings, result.engine
    threads = f"{e.threads} thread{'s' * (e.threads > 1)}"
    lines = [f"{e.name}, {e.backend} {e.precision}, {threads}; at most {s.max_tokens} new tokens."]
    for part in result.parts:
        env, shard = part.environment, f"shard {part.shard}: " if part.shard.count > 1 else ""
        where = ", ".join([env.machine, *env.gpus])
        lines.append(f"{shard}{where}; ddtree-trt {env.product_version}; {env.started}, load {env.load_1min}.")
        if env.warning:
            lines.append(f"{shard}{env.warning}")
        if part.skipped:
            lines.append(f"{shard}{len(part.skipped)} prompts were too long for max_seq_len {e.max_seq_len}: left out.")
        for peer, facts in part.contenders.items():
            if peer:
                lines.append(f"{shard}{peer.partition('=')[0]}: {', '.join(f'{k} {v}' for k, v in facts.items())}.")
    if any(case.device for case in result.cases):
        lines.append("+device: the whole round stays on the device; elsewhere trees are built on the host.")
    if s.random_weights:
        lines.append(f"Random weights of shape {s.engine}: only times mean anything.")
    if s.forced_acceptance is not None:
        lines.append(f"Forced acceptance: every round commits up to {s.forced_acceptance} tokens, whatever they are.")
    return lines


LEGEND = (
    "tokens/s and ms/round: median over prompts [quartiles]. speedup: mean seconds per token of `ar` over the case's, "
    "[95 % bootstrap over prompts]. τ: tokens committed per round, bonus included, mean over prompts. same as ar: "
    "requests whose tokens are those of `ar` (not compared where a peer samples)."
)


def markdown(result: BenchResult) -> str:
    """Every table of a result."""
    lines: list[str] = []
    for heading, rows in groups(result):
        lines += [f"**{heading}** ({max(r.prompts for r in rows)} prompts)", "", *markdown_table(overview(rows)), ""]
        lines += [text for why in why_auto(rows) for text in (why, "")]
        tables = (
            ("Tokens/s on the same prompt, median [quartiles]", auto_ratios(rows)),
            ("Milliseconds per round by stage", stages(rows)),
            ("Round time", round_times(rows)),
        )
        for name, table in tables:
            if table[1]:
                lines += [f"{name}, {heading}:", "", *markdown_table(table), ""]
    return "\n".join([*lines, LEGEND, "", *(f"- {note}" for note in notes(result)), ""])


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    header, rows = table
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows)]
