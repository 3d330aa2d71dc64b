"""The drafter's one verb, `draft`: a batch of requests, none of them drafted for unless all can be."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from drafts import marginals
from numpy.typing import NDArray

from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom, VerifyRequest
from ddtree_trt.runtime.engines.drafters import TAIL, Drafter, SlotCalls, check_up_to_date, split
from ddtree_trt.runtime.engines.passes import SlotLengths

VOCAB, CHUNK = 11, 3


def greedy(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids, np.exp(log_probs))


def request(slot: int, bonus: int = 0, length: int = 5) -> DraftRequest:
    return DraftRequest(slot, bonus, top_k=4, length=length, draw=greedy)


def lengths(*committed: int) -> SlotLengths:
    target = SlotLengths(len(committed), 64)
    for slot, tokens in enumerate(committed):
        target.append(slot, tokens)
    return target


def draft_all(drafter: Drafter, target: SlotLengths, requests: Sequence[DraftRequest]) -> list[Draft]:
    engine = SlotCalls()
    engine.drafter, engine.target = drafter, SimpleNamespace(cache=target)
    return engine.draft(requests)


def test_nothing_is_drafted_unless_every_slot_can_be() -> None:
    model = Sum(2)
    drafter = AutoregressiveDrafter(model, CHUNK)
    for slot, tokens in enumerate((3, 8)):
        drafter.append_context(slot, np.ones(tokens, np.int64), None)
    with pytest.raises(EngineError, match=r"^slot 1 holds 9 tokens, the drafter was told of 8 of them$"):
        draft_all(drafter, lengths(3, 9), [request(0), request(1)])
    assert model.passes == [] and draft_all(drafter, lengths(3, 9), []) == []
    check_up_to_date(drafter, lengths(3, 9), 0)


class Sum:
    """A language model whose next token is the sum of all tokens before it, and which lists its passes."""

    def __init__(self, slots: int) -> None:
        self.cache = SlotLengths(slots, 64)
        self.passes: list[dict[int, int]] = []  # rows of each slot
        self._rows = np.zeros((slots, 64), np.int64)
        self._logits = np.zeros((slots, VOCAB), np.float32)

    def extend(self, chains: Sequence[VerifyRequest]) -> Sequence[NDArray[np.float32]]:
        self.passes.append({chain.slot: len(chain.tree) for chain in chains})
        self._logits[:] = 0
        for n, chain in enumerate(chains):
            past, size = self.cache.lengths[chain.slot], len(chain.tree)
            assert size <= CHUNK
            self._rows[chain.slot, past : past + size] = chain.tree.token_ids
            self.cache.append(chain.slot, size)
            self._logits[n, self._rows[chain.slot, : past + size].sum() % VOCAB] = 10
        return list(self._logits[: len(chains)])


def chain(tokens: Sequence[int], length: int) -> list[int]:
    """What follows the tokens where each next one is the sum of all before it."""
    found = list(tokens)
    for _ in range(length):
        found.append(sum(found) % VOCAB)
    return found[len(tokens) :]


def test_an_autoregressive_drafter_has_a_pass_for_every_token_of_all_slots() -> None:
    model = Sum(3)
    drafter = AutoregressiveDrafter(model, CHUNK)
    texts = {0: [1, 2, 3, 4], 2: [5]}
    for slot, text in texts.items():
        drafter.append_context(slot, np.array(text), None)
    drafts = draft_all(drafter, lengths(4, 0, 1), [request(2, 6, length=3), request(0, bonus=7)])
    assert [[d.token for d in draft.drawn or ()] for draft in drafts] == [chain([5, 6], 3), chain([1, 2, 3, 4, 7], 5)]
    for draft, length in zip(drafts, (3, 5), strict=True):
        assert marginals(draft).log_probs.shape == marginals(draft).token_ids.shape == (length, 4)
    assert model.passes == [{0: 3}, {2: 2, 0: 2}, *[{2: 1, 0: 1}] * 2, *[{0: 1}] * 2]  # a long prompt's chunks before


@pytest.mark.parametrize(
    ("count", "chunk", "slots", "rows"),
    [
        (1, 8, 3, [1]),
        (TAIL + 1, 64, 2, [TAIL, 1]),
        (64, 64, 1, [64]),
        (100, 64, 2, [64, 35, 1]),
        (100, 8, 2, [*[8] * 12, 4]),
    ],
)
def test_long_contexts_have_passes_of_their_own(count: int, chunk: int, slots: int, rows: list[int]) -> None:
    parts = split(count, chunk, slots)
    assert [part.stop - part.start for part in parts] == rows
    assert [place for part in parts for place in range(count)[part]] == [*range(count)]


def test_drafted_rows_of_an_idle_slot_are_forgotten() -> None:
    """Where a pass runs along idle slots, their rows must not reach its end."""
    model = Sum(2)
    drafter = AutoregressiveDrafter(model, CHUNK)
    drafter.append_context(0, np.array([1, 2]), None)
    drafter.draft([request(0, bonus=3)])
    assert model.cache.lengths[0] == 7
    drafter.append_context(0, np.array([3]), None)
    assert model.cache.lengths[0] == 3
    drafter.draft([request(0, bonus=4)])
    drafter.truncate(0, 2)
    assert model.cache.lengths[0] == 2


def test_what_was_drafted_and_accepted_is_not_computed_again() -> None:
    model = Sum(1)
    drafter = AutoregressiveDrafter(model, CHUNK)
    drafter.append_context(0, np.array([1, 2]), None)
    assert drafter.unseen(0) == 2
    (draft,) = drafter.draft([request(0, bonus=3)])
    assert drafter.unseen(0) == 0
    accepted = [d.token for d in draft.drawn or ()][:2]
    drafter.append_context(0, np.array([3, *accepted]), None)
    model.passes.clear()
    (draft,) = drafter.draft([request(0, bonus=9)])
    assert [d.token for d in draft.drawn or ()] == chain([1, 2, 3, *accepted, 9], 5)
    assert model.passes == [{0: 1}] * 5  # the bonus token and four drafted ones
    drafter.truncate(0, 1)
    drafter.append_context(0, np.array([4, 4]), None)
    (draft,) = drafter.draft([request(0, bonus=9)])
    assert [d.token for d in draft.drawn or ()] == chain([1, 4, 4, 9], 5)


def test_what_was_drafted_and_not_accepted_is_forgotten() -> None:
    model = Sum(1)
    drafter = AutoregressiveDrafter(model, CHUNK)
    drafter.append_context(0, np.array([1, 2]), None)
    (draft,) = drafter.draft([request(0, bonus=3)])
    first, second, *_ = [d.token for d in draft.drawn or ()]
    drafter.append_context(0, np.array([3, first, second + 1]), None)
    assert model.cache.lengths[0] == 4, "the context up to the other token"
    (draft,) = drafter.draft([request(0, bonus=9)])
    assert [d.token for d in draft.drawn or ()] == chain([1, 2, 3, first, second + 1, 9], 5)
