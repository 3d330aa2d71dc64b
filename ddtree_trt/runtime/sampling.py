"""Choosing tokens from the target's logits, along the walk only.

A sampler serves one sequence. It draws one uniform number per emitted token and inverts the distribution's cumulative
sum, so the emitted tokens depend on the target's logits, the parameters and the seed, but not on which trees were
drafted: with one seed `ar`, `dflash` and `ddtree` give the same text, up to rounding. That sampling from the target and
testing membership in the tree preserves the distribution is trivial: every emitted token is a draw from the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.params import SamplingParams

Row = NDArray[np.float32]  # [V]


@dataclass(frozen=True)
class DrawnFrom:
    """The distribution q a drafted token was drawn from, over its candidates; zero elsewhere."""

    token: int
    candidates: NDArray[np.int32]  # [K]
    probs: NDArray[np.float64]  # [K], sums to 1


class Sampler:
    """Turns logits into tokens for one sequence. Mutated by `observe`, which must see every emitted token in order."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt: list[int], stop_ids: frozenset[int], index: int = 0
    ) -> None:
        self.params = params
        entropy = None if params.seed is None else [params.seed, index]
        self.rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        self._banned = np.array(sorted(t for t in stop_ids if t < vocab_size), np.int64)  # until min_tokens
        self._left = params.min_tokens
        bias = dict(params.logit_bias)
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._penalties = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        if self._penalties:
            self._counts = np.zeros(vocab_size, np.int32)  # of output tokens
            self._seen = np.zeros(vocab_size, bool)  # in prompt or output
            self._seen[prompt] = True

    @property
    def takes_choices(self) -> bool:
        """Whether the target's own argmax is the answer, so that no logits are needed."""
        return not (self.params.stochastic or self._penalties or len(self._bias) or self._left > 0)

    def observe(self, token: int) -> None:
        """Account for an emitted token."""
        self._left -= 1
        if self._penalties:
            self._counts[token] += 1
            self._seen[token] = True

    def choose(self, logits: Row) -> int:
        """Draw the next token from the target's distribution at a row of logits [V]."""
        if not self.params.stochastic:
            return int(np.argmax(self._processed(logits)))
        return self._draw(self.distribution(logits))

    def choose_against(self, logits: Row, drawn: DrawnFrom) -> int:
        """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): keep the drafted token with probability
        min(1, p/q), else draw from the residual max(0, p − q). The result is distributed as p."""
        if not self.params.stochastic:
            return self.choose(logits)
        p = self.distribution(logits)
        q = drawn.probs[drawn.candidates == drawn.token].sum()
        if self.rng.random() * q < p[drawn.token]:
            return drawn.token
        p[drawn.candidates] -= drawn.probs
        return self._draw(np.maximum(p, 0, out=p))

    def draft(self, log_probs: Row, token_ids: NDArray[np.int32]) -> DrawnFrom:
        """Draw a draft token from the drafter's candidates [K], at this request's temperature."""
        if not self.params.stochastic:
            return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))
        scaled = log_probs.astype(np.float64) / self.params.temperature
        q = np.exp(scaled - scaled.max())
        q /= q.sum()
        return DrawnFrom(int(token_ids[self._draw(q)]), token_ids, q)

    def distribution(self, logits: Row) -> NDArray[np.float64]:
        """The distribution tokens are drawn from, float64 [V]; one-hot at temperature 0."""
        x = self._processed(logits)
        p = np.zeros(len(x), np.float64)
        if not self.params.stochastic:
            p[np.argmax(x)] = 1
            return p
        top_k = self.params.top_k
        if 0 < top_k < len(x):
            kept = np.argpartition(x, -top_k)[-top_k:]
        else:
            kept = np.arange(len(x))
        scaled = x[kept].astype(np.float64)
        weights = np.exp((scaled - scaled.max()) / self.params.temperature)
        weights /= weights.sum()
        if self.params.top_p < 1:
            weights = _nucleus(weights, self.params.top_p)
        if self.params.min_p > 0:
            weights[weights < self.params.min_p * weights.max()] = 0
        p[kept] = weights / weights.sum()
        return p

    def _processed(self, logits: Row) -> Row:
        """Logits after penalties, bias and min_tokens; the input row is left alone."""
        if not np.isfinite(logits.max()):
            raise EngineError("the target's logits are not finite; rebuild the engine from an undamaged checkpoint")
        params = self.params
        if not (self._penalties or len(self._bias) or self._left > 0):
            return logits
        x = logits.copy()
        if self._penalties:
            seen = x[self._seen]
            x[self._seen] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            x -= params.frequency_penalty * self._counts
            x -= params.presence_penalty * (self._counts > 0)
        x[self._bias_ids] += self._bias
        if self._left > 0:
            x[self._banned] = -np.inf
        return x

    def _draw(self, weights: NDArray[np.float64]) -> int:
        """Index drawn in proportion to `weights`, by inverting their cumulative sum with one uniform number."""
        cumulative = np.cumsum(weights)
        index = int(np.searchsorted(cumulative, self.rng.random() * cumulative[-1], side="right"))
        if index == len(weights):  # rounding at the very end
            index = int(np.flatnonzero(weights)[-1])
        return index


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Zero all but the smallest set of most probable tokens whose mass reaches top_p."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p]] = 0
    return weights


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of a token, its rank (1 is the most probable), and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), falling


def logprob(logits: Row, token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` under the target's raw logits [V], before penalties and temperature."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    best: tuple[tuple[int, float], ...] = ()
    if top:
        ids = np.argpartition(-x, min(top, len(x) - 1))[:top]
        ids = ids[np.lexsort((ids, -x[ids]))]
        best = tuple((int(i), float(x[i])) for i in ids)
    return TokenLogprob(token, float(x[token]), int((x > x[token]).sum()) + 1, best)
