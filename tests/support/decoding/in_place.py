"""A scripted engine whose rows are right only where each one's ancestors are the rows right before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scripted import ScriptedEngine
from scripted_models import Array, Drafter, Target

from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Verdict, VerifyRequest
from ddtree_trt.runtime.tree import TokenTree


class InPlaceEngine(ScriptedEngine):
    """Of the other rows one in `wrong_every` is wrong, with 0 none. They may not be committed; lookahead tokens must
    begin the next tree."""

    def __init__(self, target: Target, drafter: Drafter, *, wrong_every: int = 3, **options: Any) -> None:
        super().__init__(target, drafter, **options)
        self.lookahead_tokens = 0
        self._wrong_every = wrong_every
        self._ahead: dict[int, list[int]] = {}  # by slot: tokens the drafter has seen and the cache does not hold
        self._last: dict[int, tuple[TokenTree, int]] = {}  # by slot: the last tree, and how many nodes were committed

    def lookahead(self, slot: int, nodes: Array) -> None:
        tree, committed = self._last[slot]
        assert nodes[0] >= committed and (np.diff(nodes) > 0).all()
        self._ahead[slot] = tree.token_ids[nodes].tolist()
        self.lookahead_tokens += len(nodes)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        for request in requests:
            ahead = self._ahead.pop(request.slot, [])
            assert request.tree.token_ids[: len(ahead)].tolist() == ahead
            assert request.tree.depths[: len(ahead) + 1].tolist() == list(range(len(ahead) + 1))
        verdicts = super().verify(requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            assert isinstance(verdict.logits, np.ndarray)
            wrong = np.flatnonzero(request.tree.depths != np.arange(len(request.tree)))
            wrong = wrong[:: self._wrong_every] if self._wrong_every else wrong[:0]
            verdict.logits[wrong] = np.roll(verdict.logits[wrong], 1, axis=1)
            verdict.choices[:] = verdict.logits.argmax(1)
        return verdicts

    def commit(self, slot: int, path: Array, *, taps: bool) -> None:
        assert path.tolist() == list(range(len(path)))
        tree = self._slots[slot].tree
        assert tree is not None
        super().commit(slot, path, taps=taps)
        self._last[slot] = tree, len(path)

    def _draft(self, request: DraftRequest) -> Draft:
        state, ahead = self._slots[request.slot], self._ahead.get(request.slot, [])
        state.tokens += ahead
        state.known += len(ahead)
        draft = super()._draft(request)
        state.known -= len(ahead)
        del state.tokens[len(state.tokens) - len(ahead) :]
        return draft
