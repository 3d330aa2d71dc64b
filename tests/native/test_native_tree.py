"""The native tree against brute force over every prefix and against Algorithm 1 written plainly."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt import _native

LOWEST = np.finfo(np.float32).min
BUDGETS = st.one_of(st.integers(0, 40), st.just(10_000))

# root -> 1 -> {2 -> 4, 3}, root -> 5: branching, with siblings that are not neighbours
BRANCHING = np.array([-1, 0, 1, 1, 2, 0], np.int32)


Rows = tuple[np.ndarray, np.ndarray]


@st.composite
def draft_rows(draw: st.DrawFn, values: st.SearchStrategy[float]) -> Rows:
    """log_probs [L, K] with falling rows and distinct token_ids [L, K]."""
    length, width = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    rows = [sorted(draw(st.lists(values, min_size=width, max_size=width)), reverse=True) for _ in range(length)]
    log_probs = np.array(rows, np.float32).reshape(length, width)
    token_ids = np.array([draw(st.permutations(range(width))) for _ in range(length)], np.int32).reshape(length, width)
    return log_probs, token_ids


# Multiples of 1/4 add without rounding, so equal sums are exact ties; -inf marks a candidate that cannot happen.
TIED = draft_rows(st.sampled_from([0.0, -0.25, -0.5, -1.0, -float("inf")]))
UNTIED = draft_rows(st.floats(-20, 0, width=32))


def all_prefixes(log_probs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
    """(-weight, ranks) of every possible prefix, sorted."""
    length, width = log_probs.shape
    prefixes = []
    for depth in range(1, length + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            weight = 0.0
            for position, rank in enumerate(ranks):
                weight += float(log_probs[position, rank])
            if weight > -np.inf:
                prefixes.append((-weight, ranks))
    return sorted(prefixes)


def algorithm_1(log_probs: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(-weight, ranks) in pop order: the paper's heap, with weights summed from the root."""
    length, width = log_probs.shape
    weights: dict[tuple[int, ...], float] = {(): 0.0}
    heap: list[tuple[float, tuple[int, ...]]] = []
    popped: list[tuple[float, tuple[int, ...]]] = []

    def push(ranks: tuple[int, ...]) -> None:
        weight = weights[ranks[:-1]] + float(log_probs[len(ranks) - 1, ranks[-1]])
        if weight > -np.inf:
            heapq.heappush(heap, (-weight, ranks))

    if length and width:
        push((0,))
    while heap and len(popped) < budget:
        negative_weight, ranks = heapq.heappop(heap)
        popped.append((negative_weight, ranks))
        weights[ranks] = -negative_weight
        if ranks[-1] + 1 < width:
            push((*ranks[:-1], ranks[-1] + 1))
        if len(ranks) < length:
            push((*ranks, 0))
    return popped


def native_prefixes(log_probs: np.ndarray, token_ids: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The native tree as (-weight, ranks); checks its shape on the way."""
    tokens, depths, parents, log_weights = _native.build_tree(log_probs, token_ids, budget)
    n = len(tokens)
    assert n <= budget
    assert [tokens.dtype, depths.dtype, parents.dtype, log_weights.dtype] == [np.int32, np.int32, np.int32, np.float64]
    assert depths.shape == log_weights.shape == (n,)
    assert parents.shape == (n + 1,)
    assert parents[0] == -1
    ranks: list[tuple[int, ...]] = [()]
    for node in range(1, n + 1):
        assert 0 <= parents[node] < node
        rank = token_ids[depths[node - 1] - 1].tolist().index(tokens[node - 1])
        ranks.append((*ranks[parents[node]], rank))
        assert depths[node - 1] == len(ranks[node])
    return list(zip((-log_weights).tolist(), ranks[1:], strict=True))


@given(rows=st.one_of(TIED, UNTIED), budget=BUDGETS)
def test_tree_is_the_first_of_all_prefixes_sorted(rows: Rows, budget: int) -> None:
    assert native_prefixes(*rows, budget) == all_prefixes(rows[0])[:budget]


@pytest.mark.parametrize(("length", "width", "budget"), [(15, 64, 64), (15, 1024, 1024), (3, 500, 2000), (1, 5, 9)])
def test_tree_of_production_size_is_algorithm_1(length: int, width: int, budget: int) -> None:
    logits = -np.sort(-np.random.default_rng(budget).normal(0, 3, (length, width)), axis=1)
    log_probs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    token_ids = np.tile(np.arange(width, dtype=np.int32), (length, 1))
    assert native_prefixes(log_probs, token_ids, budget) == algorithm_1(log_probs, budget)


def test_impossible_candidates_never_enter() -> None:
    log_probs = np.array([[-0.1, -np.inf], [-np.inf, -np.inf]], np.float32)
    token_ids = np.array([[7, 8], [9, 10]], np.int32)
    tokens, depths, parents, _ = _native.build_tree(log_probs, token_ids, 100)
    assert (tokens.tolist(), depths.tolist(), parents.tolist()) == ([7], [1], [-1, 0])


ROWS = np.array([[-0.5, -1.0, -1.5], [-0.25, -0.5, -4.0]], np.float32)
TOKENS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


@pytest.mark.parametrize(
    ("log_probs", "token_ids", "budget", "error", "text"),
    [
        (ROWS.astype(np.float64), TOKENS, 4, TypeError, "log_probs must have dtype float32"),
        (ROWS, TOKENS.astype(np.int64), 4, TypeError, "token_ids must have dtype int32"),
        (ROWS[0], TOKENS, 4, ValueError, r"log_probs must have shape \[L, K\], found \[3\]"),
        (ROWS, TOKENS[:1], 4, ValueError, r"\[2, 3\], found \[1, 3\]"),
        (ROWS[:, ::2], TOKENS[:, :2], 4, ValueError, "log_probs must be C-contiguous"),
        (np.asfortranarray(ROWS), TOKENS, 4, ValueError, "log_probs must be C-contiguous"),
        (ROWS, TOKENS, -1, ValueError, "budget"),
        (ROWS, TOKENS, 2**31, ValueError, "budget"),
        (np.where(ROWS == -4, np.nan, ROWS), TOKENS, 4, ValueError, "not NaN"),
        (np.full((2, 1), np.nan, np.float32), TOKENS[:, :1].copy(), 4, ValueError, "not NaN"),
        (np.where(ROWS == -0.5, np.inf, ROWS), TOKENS, 4, ValueError, r"below \+inf"),
        (ROWS[:, ::-1].copy(), TOKENS, 4, ValueError, "fall along every row"),
        ([[-0.5]], TOKENS, 4, TypeError, "incompatible function arguments"),
    ],
)
def test_build_tree_refuses(
    log_probs: np.ndarray, token_ids: np.ndarray, budget: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        _native.build_tree(log_probs, token_ids, budget)


@st.composite
def trees(draw: st.DrawFn, largest: int = 40) -> np.ndarray:
    """parents [T] of any topological tree, chains and stars included."""
    count = draw(st.integers(1, largest))
    return np.array([-1, *(draw(st.integers(0, i - 1)) for i in range(1, count))], np.int32)


def ancestors(parents: np.ndarray) -> np.ndarray:
    """bool [T, T]: node j is node i or an ancestor of it."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        node = i
        while node >= 0:
            seen[i, node] = True
            node = parents[node]
    return seen


@given(parents=trees(), past=st.integers(0, 9), padding=st.integers(0, 5))
def test_attention_bias(parents: np.ndarray, past: int, padding: int) -> None:
    tree_tokens = len(parents)
    out = np.full((tree_tokens, past + tree_tokens + padding), np.nan, np.float32)
    _native.attention_bias(parents, past, out)
    visible = np.zeros(out.shape, bool)
    visible[:, :past] = True
    visible[:, past : past + tree_tokens] = ancestors(parents)
    np.testing.assert_array_equal(out, np.where(visible, np.float32(0), LOWEST))


@given(parents=trees(largest=100))
def test_packed_mask(parents: np.ndarray) -> None:
    mask = _native.packed_mask(parents)
    tree_tokens = len(parents)
    assert mask.dtype == np.int32
    assert mask.shape == (tree_tokens, -(-tree_tokens // 32))
    bits = (mask.view(np.uint32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    unpacked = bits.reshape(tree_tokens, -1).astype(bool)
    np.testing.assert_array_equal(unpacked[:, :tree_tokens], ancestors(parents))
    assert not unpacked[:, tree_tokens:].any()


def walk_plainly(parents: np.ndarray, token_ids: np.ndarray, choices: np.ndarray) -> list[int]:
    path = [0]
    while True:
        here = path[-1]
        matches = [c for c in range(1, len(parents)) if parents[c] == here and token_ids[c - 1] == choices[here]]
        if not matches:
            return path
        path.append(matches[0])


@given(parents=trees(largest=12), data=st.data(), dtype=st.sampled_from([np.int64, np.int32]))
def test_walk(parents: np.ndarray, data: st.DataObject, dtype: type) -> None:
    # Few tokens, so that paths are long and siblings may share a token.
    count = len(parents)
    token_ids = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count - 1, max_size=count - 1)), np.int32)
    choices: np.ndarray = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), dtype)
    path = _native.walk(parents, token_ids, choices)
    assert path.dtype == np.int32
    assert path.tolist() == walk_plainly(parents, token_ids, choices)


def test_walk_compares_whole_int64_tokens() -> None:
    parents = np.array([-1, 0], np.int32)
    assert _native.walk(parents, np.array([5], np.int32), np.array([5 + 2**32, 0])).tolist() == [0]
    assert _native.walk(parents, np.array([5], np.int32), np.array([5, 0])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ([], "at least one node"),
        ([0], r"parents\[0\] is 0"),
        ([-1, 1], r"parents\[1\] is 1"),
        ([-1, 0, -1], r"parents\[2\] is -1"),
        ([-1, 2, 0], r"parents\[1\] is 2"),
    ],
)
def test_parents_must_be_topological(parents: list[int], text: str) -> None:
    array = np.array(parents, np.int32)
    count = len(parents)
    for call in (
        lambda: _native.attention_bias(array, 0, np.empty((count, count), np.float32)),
        lambda: _native.packed_mask(array),
        lambda: _native.walk(array, np.zeros(max(count - 1, 0), np.int32), np.zeros(count, np.int64)),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("past", "out", "error"),
    [
        (2, np.empty((6, 7), np.float32), ValueError),
        (-1, np.empty((6, 7), np.float32), ValueError),
        (2**62, np.empty((6, 7), np.float32), ValueError),
        (0, np.empty((5, 6), np.float32), ValueError),
        (0, np.empty((6, 12), np.float32)[:, ::2], ValueError),
        (0, np.empty((6, 6), np.float64), TypeError),
        (0, frozen(np.empty((6, 6), np.float32)), TypeError),
    ],
)
def test_attention_bias_refuses(past: int, out: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error):
        _native.attention_bias(BRANCHING, past, out)


@pytest.mark.parametrize(
    ("token_ids", "choices", "error"),
    [
        (np.zeros(6, np.int32), np.zeros(6, np.int64), ValueError),
        (np.zeros(5, np.int32), np.zeros(5, np.int64), ValueError),
        (np.zeros(5, np.int64), np.zeros(6, np.int64), TypeError),
        (np.zeros(5, np.int32), np.zeros(6, np.float32), TypeError),
    ],
)
def test_walk_refuses(token_ids: np.ndarray, choices: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error):
        _native.walk(BRANCHING, token_ids, choices)
