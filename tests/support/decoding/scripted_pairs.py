"""Scripted drafters whose candidates depend on the token before them, and the engine that drafts with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from scripted import ScriptedEngine
from scripted_models import Array, Good, MarkovTarget

from ddtree_trt.runtime.candidates import Bilinear
from ddtree_trt.runtime.engines.base import Draft, DraftRequest

Quality = Literal["good", "useless", "adversarial"]
QUALITIES: tuple[Quality, ...] = ("good", "useless", "adversarial")
_FLOOR = 1e-9  # of a probability


class PairsEngine(ScriptedEngine):
    """Drafts the `count` most probable candidates of each position, with the conditionals that `quality` makes."""

    def __init__(
        self, target: MarkovTarget, quality: Quality, *, count: int | None = None, block_size: int = 4
    ) -> None:
        super().__init__(target, Good(target), block_size=block_size, max_seq_len=4000)
        self._markov, self._quality = target, quality
        self._count = count or target.vocab_size - 1  # one of the target's tokens is never drafted

    def _draft(self, request: DraftRequest) -> Draft:
        state = self._slots[request.slot]
        assert state.known == len(state.tokens), "drafting needs the states of every committed token"
        length = self.manifest.drafting.longest_draft
        return Draft(pairs(self._markov, self._quality, [*state.tokens, request.bonus_token], length, self._count))


def pairs(target: MarkovTarget, quality: Quality, context: Sequence[int], length: int, count: int) -> Bilinear:
    """The candidates behind a context that ends with the bonus token. Unary scores are those of the marginals; the
    factors add what a token's probability after each other token differs from them."""
    vocab = target.vocab_size
    marginals = target.marginals(context[-2] if len(context) > 1 else 0, context[-1], length)
    unary, ids = np.zeros((length, count), np.float32), np.zeros((length, count), np.int32)
    left, right = (np.zeros((length, count, vocab), np.float32) for _ in range(2))
    after = _transitions(target, context, length)
    parents = np.array([context[-1]])
    for t in range(length):
        scores = np.log(np.maximum(_shaped(marginals[t][None], quality), _FLOOR))[0]
        ids[t] = np.argsort(-scores, kind="stable")[:count]
        unary[t] = scores[ids[t]]
        conditional = np.log(np.maximum(_shaped(after[t], quality), _FLOOR))
        left[t, : len(parents)] = (conditional - scores)[parents]
        right[t] = np.eye(vocab)[ids[t]]
        parents = ids[t]
    return Bilinear(unary, ids, left, right)


def _transitions(target: MarkovTarget, context: Sequence[int], length: int) -> list[Array]:
    """The distribution of each position's token given the one before it: [V, V] for each of `length` positions."""
    weights = np.exp(target.table.astype(np.float64))
    follows = weights / weights.sum(-1, keepdims=True)  # [V, V, V]: of a token after two others
    joint = np.zeros(target.table.shape[:2])
    joint[context[-2] if len(context) > 1 else 0, context[-1]] = 1
    found = []
    for _ in range(length):
        triples = joint[:, :, None] * follows
        joint = triples.sum(0)
        found.append(joint / np.maximum(joint.sum(-1, keepdims=True), _FLOOR))
    return found


def _shaped(probs: Array, quality: Quality) -> Array:
    """Distributions [..., V] as a drafter of that quality has them: the adversarial one is sure of what is least likely
    and gives what is most likely no chance."""
    if quality == "good":
        return probs
    if quality == "useless":
        return np.full_like(probs, 1 / probs.shape[-1])
    worst = 1 / (probs + 1e-3) ** 2
    np.put_along_axis(worst, probs.argmax(-1, keepdims=True), 0, axis=-1)
    return worst / worst.sum(-1, keepdims=True)
