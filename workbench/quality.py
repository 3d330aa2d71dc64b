"""Compare the next-token distributions of two engines of one model over prose.

    python -m workbench quality ENGINE REFERENCE [--text FILE ...] [--tokens N] [--window N] [--threads N] [--fp8 on]

Both engines read the same windows of text. Printed are the mean Kullback-Leibler divergence from the reference to the
engine in nats a token, the share of tokens after which both have the same best token, and the perplexity of each. The
default text is the prose of this repository's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.options import Fp8
from ddtree_trt.runtime.text.codec import TextCodec

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("architecture.md", "generation.md", "serving.md", "deployment.md")
OUR_PROSE: list[Path] = []
SHORTEST = 200  # characters of a paragraph of prose
MARKUP = tuple("#|`-<!0123456789")  # what headings, tables, lists, code and comments begin with
BLOCKS = ("```", "<!--", "\n|")  # what else is in paragraphs that hold code, comments or tables


@dataclass(frozen=True)
class Quality:
    """How far an engine is from its reference, over `tokens` rows of logits."""

    tokens: int
    divergence: float  # nats a token
    same_best: float  # share
    perplexity: float
    reference_perplexity: float


def compare(engine: Engine, reference: Engine, token_ids: Sequence[int], window: int) -> Quality:
    """The two engines over whole windows of `token_ids`, each read from an empty cache. Uses slot 0 of both. Raises
    UsageError where there is no whole window or it is longer than an engine allows."""
    longest = min(e.manifest.limits.max_seq_len for e in (engine, reference))
    if not 2 <= window <= longest:
        raise UsageError(f"--window must be from 2 to {longest}, the shorter context of both engines, not {window}")
    if len(token_ids) < window:
        raise UsageError(f"the text has {len(token_ids)} tokens, less than one window of {window}; give more --text")
    divergence, same, losses = [], [], []
    for start in range(0, len(token_ids) - window + 1, window):
        tokens = np.array(token_ids[start : start + window], np.int64)
        found, expected = log_probs(engine, tokens), log_probs(reference, tokens)
        divergence.append((np.exp(expected) * (expected - found)).sum(-1).mean())
        same.append((found.argmax(-1) == expected.argmax(-1)).mean())
        losses.append([-np.take_along_axis(rows[:-1], tokens[1:, None], -1).mean() for rows in (found, expected)])
    perplexities = np.exp(np.mean(losses, 0))
    return Quality(len(same) * window, float(np.mean(divergence)), float(np.mean(same)), *map(float, perplexities))


def log_probs(engine: Engine, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Log-probabilities [T, V] of what follows each of T tokens."""
    chunk = engine.manifest.limits.prefill_chunk
    engine.truncate(0, 0)
    parts = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    logits = np.concatenate([np.array(engine.prefill(0, part, rows="all", taps=False).logits) for part in parts])
    engine.truncate(0, 0)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def documentation() -> str:
    """The paragraphs of prose in this repository's documentation."""
    paragraphs = [p for page in PAGES for p in (DOCS / page).read_text(encoding="utf-8").split("\n\n")]
    plain = (" ".join(p.split()) for p in paragraphs if not (p.startswith(MARKUP) or any(b in p for b in BLOCKS)))
    return "\n\n".join(p for p in plain if len(p) >= SHORTEST)


def main(
    engine: Path,
    reference: Annotated[Path, typer.Argument(help="an engine of the same target in a finer precision")],
    text: Annotated[list[Path], typer.Option(help="a file of prose; repeatable")] = OUR_PROSE,
    tokens: Annotated[int, typer.Option(help="at most so many of the text")] = 5120,
    window: Annotated[int, typer.Option(help="tokens that are read from an empty cache")] = 512,
    threads: int = 0,
    fp8: Annotated[Fp8, typer.Option(help="weights of ENGINE, on PyTorch")] = "off",
) -> None:
    prose = "\n\n".join(path.read_text(encoding="utf-8") for path in text) or documentation()
    token_ids = TextCodec(reference, {}).encode(prose)[:tokens]
    with (
        closing(open_engine(engine, threads=threads, fp8=fp8)) as own,
        closing(open_engine(reference, threads=threads)) as other,
    ):
        if own.manifest.target.sha256 != other.manifest.target.sha256:
            raise UsageError(f"{engine} and {reference} are engines of different targets")
        found = compare(own, other, token_ids, window)
    print(
        f"{found.tokens} tokens: divergence {found.divergence:.4f} nats a token, same best token {found.same_best:.1%}"
    )
    print(f"perplexity {found.perplexity:.2f}, of the reference {found.reference_perplexity:.2f}")
