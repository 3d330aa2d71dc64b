"""Targets and drafters of the scripted engine: distributions that a test can write down."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddtree_trt.runtime import tree as trees
from ddtree_trt.runtime.tree import Candidates, LinkedRows, TokenTree

Array = np.ndarray
_FLOOR = 1e-9  # of a probability


# Targets


class Target(Protocol):
    vocab_size: int

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        """float32 [T, V]: what follows each node of the tree behind the committed tokens."""


class MarkovTarget:
    """The next token depends on the last two; before the first token stands token 0."""

    def __init__(self, vocab_size: int = 6, seed: int = 0, spread: float = 1.5) -> None:
        self.vocab_size = vocab_size
        shape = (vocab_size, vocab_size, vocab_size)
        self.table = np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)
        self._probs = _softmax(self.table.astype(np.float64))
        self.pairs = self._probs.mean(0)  # [V, V]: what follows a token, the one before it unknown

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        before = tree.token_ids[tree.parents]
        before[0] = committed[-1] if committed else 0
        return self.table[before, tree.token_ids]

    def row(self, context: Sequence[int]) -> Array:
        """float32 [V]: logits of what follows the tokens."""
        return self.table[context[-2] if len(context) > 1 else 0, context[-1]]

    @functools.cache  # noqa: B019  a target lives as long as its test
    def marginals(self, before: int, last: int, length: int) -> Array:
        """float64 [length, V]: the true distribution of each of the tokens that follow."""
        pairs, rows = np.zeros(self.table.shape[:2]), []
        pairs[before, last] = 1
        for _ in range(length):
            triples = pairs[:, :, None] * self._probs
            pairs = triples.sum(0)
            rows.append(pairs.sum(0))
        return np.array(rows)


class SayingTarget:
    """Says the tokens of a script behind a prompt, then `end` for ever."""

    def __init__(self, script: Sequence[int], vocab_size: int, prompt_length: int = 1, end: int = 0) -> None:
        self.script, self.vocab_size, self.prompt_length, self.end = list(script), vocab_size, prompt_length, end

    def word(self, position: int) -> int:
        index = position - self.prompt_length
        return self.script[index] if 0 <= index < len(self.script) else self.end

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        rows = np.zeros((len(tree), self.vocab_size), np.float32)
        for row, depth in zip(rows, tree.depths.tolist(), strict=True):
            row[self.word(len(committed) + depth + 1)] = 10
        return rows


# Drafters


class Drafter(Protocol):
    def block(self, context: Sequence[int], length: int) -> Array:
        """float64 [length, V]: the marginals of the tokens that follow the context, which ends with the bonus token."""


@dataclass
class Good:
    """The target's own marginals at temperature 1."""

    target: MarkovTarget

    def block(self, context: Sequence[int], length: int) -> Array:
        return self.target.marginals(context[-2] if len(context) > 1 else 0, context[-1], length)


@dataclass
class Useless:
    """Knows nothing: every token is as likely as any other."""

    vocab_size: int

    def block(self, context: Sequence[int], length: int) -> Array:
        return np.full((length, self.vocab_size), 1 / self.vocab_size)


@dataclass
class Adversarial:
    """Sure of what the target thinks least likely, and sure that what it thinks most likely cannot be."""

    target: MarkovTarget

    def block(self, context: Sequence[int], length: int) -> Array:
        probs = Good(self.target).block(context, length)
        worst = 1 / (probs + 1e-3) ** 2
        worst[np.arange(length), probs.argmax(1)] = 0
        return worst / worst.sum(1, keepdims=True)


@dataclass
class Linked:
    """Drafts tokens that depend on the one before: pairs float64 [V, V], row a the distribution of what follows a."""

    pairs: Array

    def block(self, context: Sequence[int], length: int) -> Array:
        rows = [self.pairs[context[-1]]]
        for _ in range(length - 1):
            rows.append(rows[-1] @ self.pairs)
        return np.array(rows)

    def candidates(self, context: Sequence[int], length: int, k: int) -> Candidates:
        """The `k` most probable of every row."""
        vocab = len(self.pairs)
        ids = np.argsort(-self.pairs, axis=1, kind="stable")[:, :k]
        with np.errstate(divide="ignore"):
            log_probs = np.log(np.take_along_axis(self.pairs, ids, 1))
        before = [context[-1], *np.tile(np.arange(vocab), length - 1)]  # the token before each row
        places = np.array([0, *np.repeat(np.arange(1, length), vocab)])
        links = np.where(places[:, None] + 1 < length, 1 + places[:, None] * vocab + ids[before], -1)
        return LinkedRows(log_probs[before].astype(np.float32), ids[before].astype(np.int32), links.astype(np.int32))


@dataclass
class Bilinear:
    """Drafts the `count` most probable candidates of each position by a drafter's marginals, with factors for what each
    one's probability after each other token differs from them."""

    marginals: Drafter
    pairs: Array  # float64 [V, V]: row a the distribution of what follows a
    count: int

    def block(self, context: Sequence[int], length: int) -> Array:
        return self.marginals.block(context, length)

    def candidates(self, context: Sequence[int], length: int, k: int) -> Candidates:
        scores = np.log(np.maximum(self.block(context, length), _FLOOR))
        ids = np.argsort(-scores, axis=1, kind="stable")[:, : self.count]
        unary = np.take_along_axis(scores, ids, 1)
        left = np.zeros((length, self.count, len(self.pairs)))
        parents = np.array([context[-1]])
        for t in range(length):
            left[t, : len(parents)] = (np.log(np.maximum(self.pairs, _FLOOR)) - scores[t])[parents]
            parents = ids[t]
        right = np.eye(len(self.pairs), dtype=np.float32)[ids]
        return trees.Bilinear(unary.astype(np.float32), ids.astype(np.int32), left.astype(np.float32), right)


@dataclass
class Saying:
    """Drafts the script right for as many tokens as `lengths` says, round by round, and wrong from there on."""

    target: SayingTarget
    lengths: Callable[[], int]

    def block(self, context: Sequence[int], length: int) -> Array:
        right, vocab = self.lengths(), self.target.vocab_size
        probs = np.zeros((length, vocab))
        for depth in range(length):
            word = self.target.word(len(context) + depth)
            probs[depth, word if depth < right else (word + 1) % vocab] = 1
        return probs


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
