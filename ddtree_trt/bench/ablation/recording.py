"""Drafts behind every token of greedy texts, and the rounds that any way of making trees would have had over them.

At temperature 0 a round's draft depends on the committed text alone, and that is the same for every tree. So the rounds
of decoding with a tree follow from the text and the drafts, without a pass over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.candidates import Candidates
from ddtree_trt.runtime.engines.base import DraftRequest, Draw, Engine
from ddtree_trt.runtime.tree import DraftTree, descend

MakeTree = Callable[[Candidates], DraftTree]
DraftBehind = Callable[["RecordedText", int], Candidates]  # of a text and the number of a token of it


@dataclass(frozen=True)
class RecordedText:
    """A prompt, the target's tokens after it, and what is drafted behind each of them but the last."""

    token_ids: tuple[int, ...]
    start: int  # number of the prompt's tokens
    drafts: tuple[Candidates, ...] = ()  # drafts[i] is behind token start + i; () where they are made for each tree


@dataclass(frozen=True)
class Rounds:
    """The rounds of one way of making trees over all texts."""

    lengths: tuple[tuple[int, ...], ...]  # per text: tokens committed per round, bonus included
    nodes: float  # draft nodes per round, mean
    expected: float  # tokens per round that the drafter's probabilities promise, mean

    @property
    def tau(self) -> float:
        """Mean over texts of the tokens per round, as benchmarks have it."""
        return float(np.mean([np.mean(lengths) for lengths in self.lengths]))

    @property
    def histogram(self) -> dict[int, int]:
        """Rounds by the number of tokens they commit."""
        flat = [n for lengths in self.lengths for n in lengths]
        return {n: flat.count(n) for n in sorted(set(flat))}


def record(
    engine: Engine, texts: Sequence[tuple[Sequence[int], int]], top_k: int, draw: Draw, progress: Progress = no_progress
) -> list[RecordedText]:
    """The drafts of texts (token ids, number of the prompt's), with `top_k` candidates per position. Uses slot 0, and
    leaves it empty."""
    length, recorded = engine.manifest.drafting.longest_draft, []
    for number, (token_ids, start) in enumerate(texts):
        progress("record drafts", number, len(texts))
        engine.truncate(0, 0)
        drafts = []
        for place in range(start, len(token_ids) - 1):
            commit(engine, token_ids, place)
            found = engine.draft([DraftRequest(0, token_ids[place], top_k, length, draw)])
            drafts.append(found[0].candidates)
        recorded.append(RecordedText(tuple(token_ids), start, tuple(drafts)))
    engine.truncate(0, 0)
    progress("record drafts", len(texts), len(texts))
    return recorded


def recorded_draft(text: RecordedText, place: int) -> Candidates:
    """What was drafted behind a token."""
    return text.drafts[place - text.start]


def commit(engine: Engine, token_ids: Sequence[int], end: int) -> None:
    """Commit the tokens up to `end`."""
    chunk = engine.manifest.limits.prefill_chunk
    for begin in range(engine.length(0), end, chunk):
        piece = np.array(token_ids[begin : min(begin + chunk, end)], np.int64)
        engine.prefill(0, piece, rows="none", taps=True)


def _chooses(token_ids: Sequence[int]) -> Callable[[int], int | None]:
    """A target's choices along a walk: these tokens, whatever the nodes."""
    following = iter(token_ids)
    return lambda node: next(following, None)


def replay_rounds(
    texts: Sequence[RecordedText], make_tree: MakeTree, draft_behind: DraftBehind = recorded_draft
) -> Rounds:
    """The rounds that decoding these texts takes with such trees."""
    lengths, nodes, expected = [], list[int](), list[float]()
    for text in texts:
        place, found = text.start, list[int]()
        while (left := len(text.token_ids) - 1 - place) > 0:
            tree = make_tree(draft_behind(text, place))
            found.append(min(len(descend(tree, _chooses(text.token_ids[place + 1 :]))), left))
            nodes.append(len(tree))
            expected.append(1 + float(np.exp(tree.log_weights).sum()))
            place += found[-1]
        if found:
            lengths.append(tuple(found))
    return Rounds(tuple(lengths), float(np.mean(nodes)), float(np.mean(expected)))
