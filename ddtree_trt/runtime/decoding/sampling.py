"""Choosing tokens from the target's logits, along the walk only.

A token is drawn by noise that belongs to its position and id (`Noise`), so the emitted tokens depend on the target's
logits, the parameters and the seed, but not on which trees were drafted: with one seed `ar`, `dflash` and `ddtree` give
the same text, except where two tokens are within rounding of each other. That the distribution is preserved is trivial:
every emitted token is a draw from the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DrawnFrom, Rows
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.matcher import Mask, Matcher, Preparing

Row = NDArray[np.float32]  # [V]
Floats = NDArray[np.float64]
Ids = NDArray[np.int32]
_NOT_FINITE = (
    "the target's logits are not finite; rebuild the engine from an undamaged checkpoint, or an engine in fp16, in "
    "which states above 65504 overflow, with --precision bf16 or fp32"
)


class Noise:
    """The random numbers of one completion, by the rule in `cpp_plugins/include/ddtree/noise.h` for host and device.
    Positions are indices in the whole sequence, prompt and output.

    A token is the argmax of log-weight + Gumbel noise, which belongs to (seed, position, token id): a difference by
    rounding changes it at near ties only. Each purpose has a seed, and no number is used twice: a position is emitted
    once, and the drafter's noise also depends on the start of its round, as later ones may draft for a position again.
    """

    def __init__(self, seed: int | None, index: int) -> None:
        """For the request's completion `index`; without a seed the numbers are random."""
        # Of a word each, as a seed's own upper words would stand where another's index does.
        sequence = np.random.SeedSequence(None if seed is None else [seed % (1 << 32), index, seed >> 32])
        self._target, self._draft, self._keep, self._residual = sequence.generate_state(4, np.uint64).tolist()
        self._round_start, self._round_seed = -1, 0  # of the latest draft: its round's first position, and its seed

    @property
    def target_seed(self) -> int:
        """The seed of the target's draws, as an int64, for a device that draws by the same rule."""
        return self._target - (1 << 64) if self._target >> 63 else self._target

    def draw_logits(self, position: int, logits: NDArray[np.float32], temperature: float) -> int:
        """The target's token from logits [V]; -1 where one is NaN or +inf, or none is finite."""
        return _native.draw_logits(logits, temperature, self._target, position)

    def draw(self, position: int, weights: Floats, ids: Ids | None) -> int:
        """The target's token as an index into weights [K] of the tokens `ids` [K]; None for 0 … K − 1."""
        return _native.draw_weights(weights, self._target, position, ids)

    def draft(self, start: int, position: int, weights: Floats, ids: Ids) -> int:
        """The drafter's token as an index into weights [K]. `start` is the first position its round drafts for."""
        if self._round_start != start:
            self._round_start, self._round_seed = start, _native.noise_bits(self._draft, start, 0)
        return _native.draw_weights(weights, self._round_seed, position, ids)

    def keeps(self, position: int, p: float, q: float) -> bool:
        """Whether a drafted token is kept: true with probability min(1, p/q)."""
        return (_native.noise_bits(self._keep, position, 0) >> 11) * 2.0**-53 * q < p

    def residual(self, position: int, weights: Floats) -> int:
        """The token drawn from weights [V] in place of a rejected one; -1 where all are 0."""
        return _native.draw_weights(weights, self._residual, position)


class Sampler:
    """Chooses the tokens of one sequence from logits. `observe` must get every emitted token in order."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: list[int],
        stop_ids: frozenset[int],
        index: int = 0,
        matcher: Matcher | Preparing | None = None,
    ) -> None:
        """`matcher`: holds the output to `params.structured`; None where there is no constraint."""
        self.params = params
        # Whether tokens are excluded by their probabilities, which must then be computed.
        self._filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._matcher = matcher
        self.constrained = matcher is not None
        self.noise = Noise(params.seed, index)
        self._position = len(prompt)  # of the next token in the whole sequence
        self._banned = np.array(sorted(t for t in stop_ids if t < vocab_size), np.int64)  # until min_tokens
        self._left = params.min_tokens
        bias = dict(params.logit_bias)
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._penalties = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        if self._penalties:
            self._counts = np.zeros(vocab_size, np.int32)  # of output tokens
            self._seen = dict.fromkeys(prompt)  # tokens of prompt and output, each once
        self._choose_how()

    @property
    def matcher(self) -> Matcher | None:
        """What holds the output to its constraint. Waits until it is made; raises UsageError where it cannot be."""
        if isinstance(self._matcher, Preparing):
            self._matcher = self._matcher.started.result()
        return self._matcher

    def prepare(self) -> bool:
        """Begin to make the matcher, if that is still to be done; returns whether it has been."""
        return not isinstance(self._matcher, Preparing) or self._matcher.started.done()

    def _choose_how(self) -> None:
        processed = self._penalties or len(self._bias) or self._left > 0
        # Whether the next token is the argmax of the target's logits, so that no row of them is needed.
        self.takes_choices = not (self.params.stochastic or processed or self._matcher)

    def observe(self, tokens: Sequence[int]) -> bool:
        """Count emitted tokens; returns whether the constraint of the output, if there is one, allows no more."""
        self._position += len(tokens)
        if self._left > 0:
            self._left -= len(tokens)
            self._choose_how()
        if self._penalties:
            for token in tokens:
                self._counts[token] += 1
                self._seen[token] = None
        if self._matcher is None or (matcher := self.matcher) is None:
            return False
        for token in tokens:
            matcher.advance(token)
        return matcher.ended

    def pick(self, choice: int, logits: Rows) -> int:
        """The next token at the last row of logits, whose argmax is `choice`."""
        if not self.takes_choices:
            return self.choose(logits[-1])
        if not math.isfinite(logits[-1, choice]):
            raise EngineError(_NOT_FINITE)
        return choice

    def choose(self, logits: Row) -> int:
        """Draw the next token from the target's distribution at a row of logits [V]."""
        matcher = self.matcher
        if matcher is None:
            return self._draw(logits)
        if not (self.params.stochastic and self._filters):
            # An argmax, of logits or of logits with noise, is that of the allowed tokens too if it is one of them.
            token = self._draw(logits)
            if matcher.allows(token):
                return token
        return self._draw(_masked(logits, matcher.mask()))

    def _draw(self, logits: Row) -> int:
        if not self.params.stochastic:
            return self._best(logits)
        if not self._filters:
            token = self.noise.draw_logits(self._position, self._processed(logits), self.params.temperature)
            if token < 0:
                raise EngineError(_NOT_FINITE)
            return token
        ids, weights = self._support(logits)
        index = self.noise.draw(self._position, weights, ids)
        return index if ids is None else int(ids[index])

    def choose_against(self, logits: Row, drawn: DrawnFrom) -> int:
        """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): keep the drafted token with probability
        min(1, p/q), else draw from the residual max(0, p − q). The result is distributed as p."""
        if not self.params.stochastic:
            return self.choose(logits)
        p = self.distribution(logits)
        q = drawn.probs[drawn.candidates == drawn.token].sum()
        if self.noise.keeps(self._position, p[drawn.token], q):
            return drawn.token
        p[drawn.candidates] -= drawn.probs
        token = self.noise.residual(self._position, np.maximum(p, 0, out=p))
        return drawn.token if token < 0 else token  # no residual: p and q differ by rounding only

    def draft(self, log_probs: Row, token_ids: Ids, depth: int) -> DrawnFrom:
        """Draw a draft token from the drafter's candidates [K], by falling probability, at this request's temperature
        and filters: any distribution is valid. `depth` is 0 for the token behind the bonus token."""
        params = self.params
        if not params.stochastic:
            return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))
        if params.top_k:
            log_probs, token_ids = log_probs[: params.top_k], token_ids[: params.top_k]
        if not math.isfinite(log_probs[0]):
            raise EngineError(f"the drafter's log-probabilities are not finite: {log_probs[0]}; rebuild the engine")
        q = self._weights(log_probs)
        q /= q.sum()
        index = self.noise.draft(self._position, self._position + depth, q, token_ids)
        return DrawnFrom(int(token_ids[index]), token_ids, q)

    def distribution(self, logits: Row) -> Floats:
        """The distribution that tokens are drawn from, float64 [V]; one-hot at temperature 0."""
        if self.matcher is not None:
            logits = _masked(logits, self.matcher.mask())
        if self.params.stochastic:
            ids, weights = self._support(logits)
            weights /= weights.sum()
        else:
            ids, weights = np.array([self._best(logits)], np.int32), np.ones(1)
        if ids is None:
            return weights
        p = np.zeros(len(logits), np.float64)
        p[ids] = weights
        return p

    def _best(self, logits: Row) -> int:
        x = self._processed(logits)
        token = int(x.argmax())
        if not math.isfinite(x[token]):
            raise EngineError(_NOT_FINITE)
        return token

    def _support(self, logits: Row) -> tuple[Ids | None, Floats]:
        """The tokens [K] that can be drawn, rising, or None for all V, and their weights [K]."""
        x, top_k = self._processed(logits), self.params.top_k
        if not 0 < top_k < len(x):
            return None, self._weights(x)
        kept = np.sort(np.argpartition(x, -top_k)[-top_k:]).astype(np.int32)
        return kept, self._weights(x[kept])

    def _weights(self, logits: Row) -> Floats:
        """Probabilities of logits after temperature, top_p and min_p over the largest, float64 of their shape."""
        params, largest = self.params, float(logits.max())
        if not math.isfinite(largest):
            raise EngineError(_NOT_FINITE)
        weights = logits.astype(np.float64)
        weights -= largest
        if params.temperature != 1:
            weights /= params.temperature
        np.exp(weights, out=weights)
        if params.top_p < 1:
            _native.keep_nucleus(weights, params.top_p)
        if params.min_p > 0:
            weights *= weights >= params.min_p
        return weights

    def _processed(self, logits: Row) -> Row:
        """Logits after penalties, bias and min_tokens; the input row is not changed."""
        params = self.params
        if not (self._penalties or len(self._bias) or self._left > 0):
            return logits
        x = logits.copy()
        if self._penalties:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            seen, counts = x[ids], self._counts[ids]
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            x[ids] = seen - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        x[self._bias_ids] += self._bias
        if self._left > 0:
            ends = x[self._banned]
            x[self._banned] = -np.inf
            if self.matcher is not None and not np.isfinite(x.max()):  # the constraint allows the end only
                x[self._banned] = ends
        return x


def _masked(logits: Row, mask: Mask) -> Row:
    """Logits [V] with −∞ for tokens that are not allowed."""
    return np.where(mask, logits, np.float32(-np.inf))


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
        ids = np.argpartition(logits, -min(top, len(x)))[-top:]
        ids = ids[np.lexsort((ids, -logits[ids]))]
        best = tuple((int(i), float(x[i])) for i in ids)
    return TokenLogprob(token, float(x[token]), int((logits > logits[token]).sum()) + 1, best)
