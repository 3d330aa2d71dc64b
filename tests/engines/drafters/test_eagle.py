"""The EAGLE-3 drafter: which nodes it expands, the rows of its cache, and every number against PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, NewRows
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.candidates import LinkedRows
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.passes import SlotLengths
from ddtree_trt.runtime.tree import DraftTree, best_tree

K = 4


def never(*_: object) -> DrawnFrom:
    raise AssertionError("a tree's drafter draws nothing")


def request(bonus: int, *, length: int = 4, slot: int = 0) -> DraftRequest:
    return DraftRequest(slot, bonus, K, length, never)


class Scripted:
    """A network whose candidates are a function of the path: it keeps the tokens of its rows and the states they came
    with, and an output is the path itself."""

    def __init__(self, slots: int = 1, rows: int = 256) -> None:
        self.cache = SlotLengths(slots, rows)
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(slots)]  # (token, state) of committed rows
        self.absorbed: list[dict[int, int]] = []  # rows of each slot of each pass
        self.expanded: list[Sequence[NewRows]] = []
        self.barren = -1  # a bonus token behind whose children nothing is possible

    def join(self, pieces: Sequence[Any]) -> Any:
        return np.concatenate(pieces)

    def absorb(self, rows: Sequence[NewRows], top_k: int) -> Level:
        for each in rows:
            token_ids = each.tree.token_ids.tolist()
            self.rows[each.slot][self.cache.lengths[each.slot] :] = zip(token_ids, each.states[:, 0], strict=True)
            self.cache.append(each.slot, len(token_ids))
            assert each.first == len(token_ids) - 1 >= 0
        self.absorbed.append({each.slot: len(each.tree) for each in rows})
        return self._level([(int(each.tree.token_ids[-1]),) for each in rows], top_k)

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        self.expanded.append(rows)
        return self._level([path for each in rows for path in paths_in(each)[each.first :]], top_k)

    def _level(self, paths: list[tuple[int, ...]], top_k: int) -> Level:
        found = [candidates(path, top_k) for path in paths]
        log_probs = np.stack([f[0] for f in found])
        log_probs[[len(path) > 1 and path[0] == self.barren for path in paths]] = -np.inf
        return Level(paths, log_probs, np.stack([f[1] for f in found]))


def paths_in(nodes: NewRows) -> list[tuple[int, ...]]:
    """Of every node."""
    return [(*feature, token) for feature, token in zip(nodes.states, nodes.tree.token_ids.tolist(), strict=True)]


def candidates(path: tuple[int, ...], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities falling and ids [k] of the tokens behind a path."""
    rng = np.random.default_rng(path)
    probs = np.sort(rng.dirichlet(np.full(16, 0.4)))[::-1][:k]
    return np.log(probs + 1e-9).astype(np.float32), rng.permutation(16)[:k].astype(np.int32)


def drafted(bonus: int, *, width: int = 3, length: int = 4) -> tuple[LinkedRows, Scripted]:
    network = Scripted()
    drafter = EagleDrafter(network, 64, 64, width)
    drafter.append_context(0, np.array([1, 2]), np.array([[10.0], [20.0]]))
    (draft,) = drafter.draft([request(bonus, length=length)])
    assert isinstance(draft.candidates, LinkedRows)
    return draft.candidates, network


def paths_of(rows: LinkedRows, bonus: int) -> dict[tuple[int, ...], float]:
    """Every candidate's path with its log-weight, by following the links; asserts that each row is its path's."""
    found: dict[tuple[int, ...], float] = {}
    visited = set()

    def visit(row: int, path: tuple[int, ...], weight: float) -> None:
        visited.add(row)
        log_probs, ids = candidates(path, K)
        np.testing.assert_array_equal(rows.token_ids[row], ids)
        np.testing.assert_array_equal(rows.log_probs[row], log_probs)
        for column, token in enumerate(ids.tolist()):
            child = (*path, token)
            found[child] = weight + float(log_probs[column])
            if rows.next_rows[row, column] >= 0:
                visit(int(rows.next_rows[row, column]), child, found[child])

    visit(0, (bonus,), 0.0)
    assert visited == set(range(len(rows.log_probs)))
    return found


def paths_within(tree: DraftTree, bonus: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [(bonus,)]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def expanded_of(bonus: int, *, width: int, length: int) -> list[set[tuple[int, ...]]]:
    """The nodes each pass expands, by the rules themselves."""
    weights: dict[tuple[int, ...], float] = {
        (bonus, int(t)): float(p) for p, t in zip(*candidates((bonus,), K), strict=True)
    }
    passes: list[set[tuple[int, ...]]] = []
    last = set(weights)
    for _ in range(1, length):
        chosen = set(sorted(last, key=lambda path: -weights[path])[:width])
        passes.append(chosen)
        last = set()
        for path in chosen:
            for p, t in zip(*candidates(path, K), strict=True):
                child = (*path, int(t))
                weights[child] = weights[path] + float(p)
                last.add(child)
    return passes


@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 6))
def test_each_pass_expands_the_most_probable_of_the_last_level(bonus: int, width: int, length: int) -> None:
    """As EAGLE-2 does; its tree, the most probable of all that was drafted, is the heap's."""
    rows, network = drafted(bonus, width=width, length=length)
    ranked = sorted(paths_of(rows, bonus).items(), key=lambda node: -node[1])
    for nodes in (1, 7, len(ranked)):
        assert paths_within(best_tree(rows, nodes), bonus) == {path for path, _ in ranked[:nodes]}
    expected = expanded_of(bonus, width=width, length=length)
    assert [set(paths_in(nodes)[nodes.first :]) for (nodes,) in network.expanded] == expected


def test_slots_grow_in_the_same_passes_until_each_ends() -> None:
    """By its length, or where nothing is possible; each with its own number of candidates."""
    asked = [request(3, slot=2), request(7, slot=0), DraftRequest(1, 5, 2, 2)]
    drafts = []
    for calls in ([asked], [[each] for each in asked]):
        network = Scripted(3)
        network.barren = 7
        drafter = EagleDrafter(network, 64, 64, width=3)
        for slot in range(3):
            drafter.append_context(slot, np.arange(1 + slot), np.ones((1 + slot, 1)))
        drafts.append([draft.candidates for call in calls for draft in drafter.draft(call)])
        if calls == [asked]:
            assert network.absorbed == [{2: 3, 0: 1, 1: 2}]
            assert [[rows.slot for rows in each] for each in network.expanded] == [[2, 0, 1], [2], [2]]
    for found, expected in zip(*drafts, strict=True):
        for name, values in vars(expected).items():
            np.testing.assert_array_equal(getattr(found, name), values)


def test_a_draft_that_may_expand_more_nodes_than_there_are_rows_for_is_an_error() -> None:
    network = Scripted()
    drafter = EagleDrafter(network, 64, 15, width=3)
    drafter.append_context(0, np.array([1]), np.array([[10.0]]))
    with pytest.raises(EngineError, match=r"7 levels with 3 nodes .* need 18 rows, .* has 15"):
        drafter.draft([request(7, length=7)])
    assert not network.absorbed and not network.expanded
    drafter.draft([request(7, length=6)])
    assert len(network.expanded[-1][0].tree) == 15


def test_a_row_has_a_tokens_states_and_the_token_behind_it() -> None:
    network = Scripted(2)
    drafter = EagleDrafter(network, 64, 64)
    drafter.append_context(1, np.array([5, 6, 7]), np.array([[50.0], [60.0], [70.0]]))
    drafter.draft([request(8, slot=1)])
    assert network.rows[1] == [(6, 50.0), (7, 60.0), (8, 70.0)] and network.rows[0] == []
    drafter.append_context(1, np.array([8, 9]), np.array([[80.0], [90.0]]))
    assert drafter.context_length(1) == 5
    drafter.draft([request(3, slot=1)])
    assert network.rows[1][3:] == [(9, 80.0), (3, 90.0)]
    assert network.cache.lengths == [0, 5]  # a draft's own rows are forgotten


def test_a_long_prompt_is_processed_as_it_comes() -> None:
    """By chunks, and but for the last row, whose token is not known yet."""
    network = Scripted()
    drafter = EagleDrafter(network, 4, 64)
    states = np.arange(11.0)[:, None]
    drafter.append_context(0, np.arange(6), states[:6])
    assert network.absorbed == [{0: 4}, {0: 1}]
    drafter.append_context(0, np.arange(6, 9), states[6:9])
    drafter.draft([request(9)])
    assert network.rows[0] == [(i + 1, float(i)) for i in range(9)]


def test_lookahead_and_forgotten_tokens() -> None:
    network = Scripted()
    drafter = EagleDrafter(network, 64, 64)
    drafter.append_context(0, np.array([1, 2]), np.array([[10.0], [20.0]]))
    drafter.append_context(0, np.array([3, 4]), np.array([[30.0], [40.0]]))  # lookahead
    drafter.draft([request(5)])
    drafter.truncate(0, 2)
    assert drafter.context_length(0) == 2
    drafter.append_context(0, np.array([3]), np.array([[31.0]]))
    drafter.draft([request(6)])
    assert network.rows[0] == [(2, 10.0), (3, 20.0), (6, 31.0)]


def test_another_token_behind_a_row_is_an_error() -> None:
    drafter = EagleDrafter(Scripted(), 64, 64)
    drafter.append_context(0, np.array([1, 2]), np.array([[10.0], [20.0]]))
    drafter.draft([request(5)])
    with pytest.raises(EngineError, match="last row was made with token 5, and 6 follows"):
        drafter.append_context(0, np.array([6]), np.array([[30.0]]))
