"""The drafter's agreement with the target: chains drafted at places of texts whose continuations the target chose.

Nothing is decoded, so that two engines can be compared at the same places of the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.methods import METHODS, Method
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine
from ddtree_trt.runtime.tree import descend

PLACES = 12  # places of one text at which a chain is drafted
LOST = 0.25  # share of the drafted tokens accepted with short contexts below which longer ones are said to fail
SHORTEST_BIN = 128  # tokens: contexts are counted by powers of two from here


@dataclass(frozen=True)
class Text:
    """A prompt's tokens and those that the target chose after it."""

    token_ids: tuple[int, ...]
    start: int  # number of the prompt's tokens

    def places(self, length: int) -> list[int]:
        """At most PLACES token numbers, rising, each of which `length` chosen tokens follow where there are so many."""
        last = max(len(self.token_ids) - 1 - length, self.start)
        return sorted(set(np.linspace(self.start, last, PLACES).astype(int).tolist()))


@dataclass(frozen=True)
class ContextBin:
    """Agreement at places with a context of at most `longest` tokens, and more than the bin before has."""

    longest: int
    places: int
    accepted: float  # drafted tokens accepted, mean


@dataclass(frozen=True)
class Agreement:
    """Leading tokens of drafted chains that the target chooses, at every place of some texts."""

    contexts: tuple[int, ...]  # [P]: tokens before the one that is drafted behind
    accepted: tuple[int, ...]  # [P]: leading drafted tokens that are the text's
    length: int  # drafted tokens of a chain
    broken_drafts: int = 0  # drafts whose log-probabilities are not finite numbers
    broken_rows: int = 0  # rows of the target, one in front of every place, whose logits are not

    @property
    def tau(self) -> float:
        """Mean tokens of a round of that chain, the target's own included."""
        return 1 + float(np.mean(self.accepted))

    @property
    def broken(self) -> bool:
        """Whether the engine computes values that are not numbers."""
        return bool(self.broken_drafts or self.broken_rows)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of places at which the drafted tokens up to position 1, 2, … are accepted."""
        return tuple(float(np.mean(np.array(self.accepted) >= d)) for d in range(1, self.length + 1))

    @property
    def by_context(self) -> tuple[ContextBin, ...]:
        """Bins of contexts up to 128, 256, 512, … tokens that have places."""
        contexts, accepted = np.array(self.contexts), np.array(self.accepted)
        edges = [-1, *(SHORTEST_BIN << i for i in range(24))]
        found = [(high, accepted[(contexts > low) & (contexts <= high)]) for low, high in pairwise(edges)]
        return tuple(ContextBin(high, len(values), float(values.mean())) for high, values in found if len(values))

    @property
    def fails_past(self) -> int | None:
        """Tokens of context from which on drafts fail that are accepted with shorter ones; None where they do not."""
        bins = self.by_context
        for number, each in enumerate(bins[1:], 1):
            best = max(b.accepted for b in bins[:number])
            if all(b.accepted < LOST * best for b in bins[number:]) and each.places >= PLACES:
                return bins[number - 1].longest
        return None


def measure_agreement(engine: Engine, texts: Sequence[Text]) -> Agreement:
    """Draft a chain at the places of every text. Uses slot 0, and leaves it empty."""
    manifest = engine.manifest
    able = [m for m in METHODS.values() if m.drafts and m.serves(manifest.drafter_kind)]
    method = min(able, key=lambda each: (each.branches, each.draws))  # of one chain, where the drafter's kind has one
    length, chunk = manifest.drafting.longest_draft, manifest.limits.prefill_chunk
    contexts, accepted, broken_drafts, broken_rows = list[int](), list[int](), 0, 0
    for text in texts:
        engine.truncate(0, 0)
        for place in text.places(length):
            for start in range(engine.length(0), place, chunk):
                piece = np.array(text.token_ids[start : min(start + chunk, place)], np.int64)
                row = engine.prefill(0, piece, rows="last", taps=True).logits[-1]
            broken_rows += not np.isfinite(row).all()
            matches = _matches(engine, method, text.token_ids[place:], length)
            contexts.append(place)
            accepted.append(matches or 0)
            broken_drafts += matches is None
    engine.truncate(0, 0)
    return Agreement(tuple(contexts), tuple(accepted), length, broken_drafts, broken_rows)


def _matches(engine: Engine, method: Method, token_ids: Sequence[int], length: int) -> int | None:
    """Leading tokens of the chain drafted behind token_ids[0] that are the following ones; None where the draft has
    values that are not numbers."""
    top_k = method.candidates(length, False)
    draft = engine.draft([DraftRequest(0, token_ids[0], top_k, length, _most_probable)])[0]
    if any(np.isnan(values).any() for values in vars(draft.candidates).values()):
        return None
    try:
        tree = method.propose(draft, length, _most_probable).tree
    except ValueError:
        return None
    tokens = iter(token_ids[1:])
    return len(descend(tree, lambda node: next(tokens, None))) - 1


def _most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))
