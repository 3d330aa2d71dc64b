"""The native trees against brute force over every prefix and against Algorithm 1 written plainly; masks and walks
against the reference."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

import kernel_reference as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt import _native
from ddtree_trt.runtime.tree import NO_ROW, Bilinear, Candidates, DraftTree, LinkedRows, Marginals

BUDGETS = st.one_of(st.integers(0, 40), st.just(10_000))
DEPTHS = st.sampled_from([None, 0, 1, 2])
# Multiples of 1/4 add without rounding, so equal sums are exact ties; -inf marks a candidate that cannot happen.
TIED = st.sampled_from([0.0, -0.25, -0.5, -1.0, -np.inf])
# root -> 1 -> {2 -> 4, 3}, root -> 5: branching, with siblings that are not neighbours
BRANCHING = np.array([-1, 0, 1, 1, 2, 0], np.int32)

Node = tuple[float, tuple[int, ...]]  # (-weight, ranks)


def falling(draw: st.DrawFn, rows: int, width: int, values: st.SearchStrategy[float]) -> np.ndarray:
    drawn = [sorted(draw(st.lists(values, min_size=width, max_size=width)), reverse=True) for _ in range(rows)]
    return np.array(drawn, np.float32).reshape(rows, width)


@st.composite
def marginals(draw: st.DrawFn) -> Marginals:
    length, width = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    values = draw(st.sampled_from([TIED, st.floats(-20, 0, width=32)]))
    ids = np.array([draw(st.permutations(range(width))) for _ in range(length)], np.int32).reshape(length, width)
    return Marginals(falling(draw, length, width, values), ids)


@st.composite
def linked_rows(draw: st.DrawFn) -> LinkedRows:
    """Up to four rows of up to three candidates; several candidates may share a row."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    links = [[draw(st.sampled_from([NO_ROW, *range(r + 1, rows)])) for _ in range(width)] for r in range(rows)]
    ids = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    return LinkedRows(falling(draw, rows, width, TIED), ids, np.array(links, np.int32))


def bilinear(seed: int, length: int = 3, count: int = 3, rank: int = 5, spread: float = 1.0) -> Bilinear:
    rng = np.random.default_rng(seed)
    unary = -np.sort(-rng.normal(0, spread, (length, count)), axis=1)
    ids = np.stack([rng.permutation(50)[:count] for _ in range(length)]) if length else np.zeros((0, count))
    left, right = rng.normal(0, spread, (2, length, count, rank))
    return Bilinear(unary.astype(np.float32), ids.astype(np.int32), left.astype(np.float32), right.astype(np.float32))


BILINEAR = st.builds(
    bilinear, st.integers(0, 2**32 - 1), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, 5])
)


def prefixes(
    candidates: Candidates, max_depth: int, row: int = 0, weight: float = 0.0, ranks: tuple[int, ...] = ()
) -> Iterator[Node]:
    """Every possible prefix below a row, its weight summed from the root."""
    if not candidates.token_ids.size or row == NO_ROW or len(ranks) == max_depth:
        return
    log_probs, _, rows = (part[0].tolist() for part in candidates.child_log_probs([row]))
    for rank, (log_prob, below) in enumerate(zip(log_probs, rows, strict=True)):
        if log_prob > -np.inf:
            yield -(weight + log_prob), (*ranks, rank)
            yield from prefixes(candidates, max_depth, below, weight + log_prob, (*ranks, rank))


def nodes(candidates: Candidates, tree: DraftTree) -> list[Node]:
    """A tree's nodes in its order; checks shapes, types, tokens and depths on the way."""
    n = len(tree.token_ids)
    assert (tree.depths.shape, tree.parents.shape, tree.log_weights.shape) == ((n,), (n + 1,), (n,))
    found = [array.dtype for array in (tree.token_ids, tree.depths, tree.parents, tree.log_weights)]
    assert found == [np.int32, np.int32, np.int32, np.float64] and tree.parents[0] == -1
    places: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # the row of a node's children, and its ranks
    for node, parent in enumerate(tree.parents[1:].tolist()):
        assert 0 <= parent <= node
        row, ranks = places[parent]
        _, token_ids, rows = (part[0] for part in candidates.child_log_probs([row]))
        (rank,) = np.flatnonzero(token_ids == tree.token_ids[node]).tolist()
        places.append((int(rows[rank]), (*ranks, rank)))
        assert tree.depths[node] == len(ranks) + 1
    return list(zip((-tree.log_weights).tolist(), [ranks for _, ranks in places[1:]], strict=True))


def assert_best(candidates: Candidates, max_depth: int | None, budgets: Iterable[int] | None = None) -> None:
    """Of these budgets, or of all from none to past the end: the first of all prefixes by (-weight, ranks)."""
    every = sorted(prefixes(candidates, 99 if max_depth is None else max_depth))
    largest = candidates.best_first(len(every) + 2, max_depth=max_depth)
    for budget in range(len(every) + 3) if budgets is None else budgets:
        tree = candidates.best_first(budget, max_depth=max_depth)
        assert nodes(candidates, tree) == every[:budget]
        cut = largest.cut(budget)
        for name in ("token_ids", "depths", "parents", "log_weights"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(tree, name))


@given(candidates=marginals(), budget=BUDGETS, max_depth=DEPTHS)
def test_trees_of_marginals_are_the_first_prefixes(candidates: Marginals, budget: int, max_depth: int | None) -> None:
    assert_best(candidates, max_depth, [budget])


@given(candidates=st.one_of(linked_rows(), BILINEAR), max_depth=DEPTHS)
def test_trees_of_conditionals_are_the_first_of_all_prefixes(candidates: Candidates, max_depth: int | None) -> None:
    assert_best(candidates, max_depth)


def algorithm_1(log_probs: np.ndarray, budget: int) -> list[Node]:
    """(-weight, ranks) in pop order: the paper's heap, with weights summed from the root."""
    length, width = log_probs.shape
    weights: dict[tuple[int, ...], float] = {(): 0.0}
    heap: list[Node] = []
    popped: list[Node] = []

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


@pytest.mark.parametrize(("length", "width", "budget"), [(15, 64, 64), (15, 1024, 1024)])
def test_tree_of_production_size_is_algorithm_1(length: int, width: int, budget: int) -> None:
    logits = -np.sort(-np.random.default_rng(budget).normal(0, 3, (length, width)), axis=1)
    log_probs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    candidates = Marginals(log_probs, np.tile(np.arange(width, dtype=np.int32), (length, 1)))
    assert nodes(candidates, candidates.best_first(budget)) == algorithm_1(log_probs, budget)


def conditional(form: Bilinear, t: int, before: int) -> np.ndarray:
    """float64 [C]: the distribution at position t after candidate `before` of the one above."""
    scores = form.unary[t].astype(np.float64) + form.right[t].astype(np.float64) @ form.left[t, before]
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(("rank", "count"), [(0, 2), (16, 5), (37, 16)])
def test_conditional_rows_are_their_definition(rank: int, count: int) -> None:
    form = bilinear(3, length=4, count=count, rank=rank, spread=0.5)
    for row in range(1 + 3 * count):
        t, before = (0, 0) if row == 0 else (1 + (row - 1) // count, (row - 1) % count)
        expected = conditional(form, t, before)
        log_probs, token_ids, rows = (part[0] for part in form.child_log_probs([row]))
        order = [form.token_ids[t].tolist().index(token) for token in token_ids]
        np.testing.assert_allclose(np.exp(log_probs), expected[order], rtol=2e-4)
        assert sorted(order) == list(range(count)) and (np.diff(log_probs) <= 0).all()
        assert rows.tolist() == ([1 + t * count + b for b in order] if t < 3 else [NO_ROW] * count)


@pytest.mark.parametrize("width", [1, 2])
def test_a_width_limits_the_children_of_every_node(width: int) -> None:
    form = bilinear(9, length=4, count=4)
    every = sorted(node for node in prefixes(form, 99) if max(node[1]) < width)
    tree = form.best_first(500, width=width)
    assert nodes(form, tree) == every
    if width == 1:
        assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_impossible_candidates_never_enter() -> None:
    form = bilinear(0, length=2, count=2, rank=1)
    unary = np.array([[0, -np.inf], [-np.inf, -np.inf]], np.float32)
    tree = Bilinear(unary, form.token_ids, form.left, form.right).best_first(9)
    assert tree.token_ids.tolist() == form.token_ids[0, :1].tolist()


def changed(form: Bilinear, name: str, value: float, place: tuple[int, ...]) -> Bilinear:
    arrays = {key: np.copy(getattr(form, key)) for key in ("unary", "token_ids", "left", "right")}
    arrays[name][place] = value
    return Bilinear(**arrays)


def linked(log_probs: list[list[float]], next_rows: list[list[int]]) -> LinkedRows:
    links = np.array(next_rows, np.int32)
    return LinkedRows(
        np.array(log_probs, np.float32), np.arange(links.size, dtype=np.int32).reshape(links.shape), links
    )


@pytest.mark.parametrize(
    ("candidates", "text"),
    [
        (changed(bilinear(1), "unary", np.nan, (1, 1)), "unary must be below .* not NaN"),
        (changed(bilinear(1), "unary", 99, (0, 2)), "unary must fall"),
        (changed(bilinear(1), "left", np.nan, (0, 0, 0)), "conditional scores"),
        (replace(bilinear(1), right=np.zeros((3, 3, 4), np.float32)), "right must have the shape of left"),
        (linked([[0], [0]], [[0], [NO_ROW]]), "next_rows must be -1 or .* later row"),
        (linked([[-1, 0]], [[NO_ROW, NO_ROW]]), "log_probs must fall"),
    ],
)
def test_candidates_that_cannot_be_used_are_refused(candidates: Candidates, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        candidates.best_first(50)


@pytest.mark.parametrize(("limit", "text"), [({"max_depth": -1}, "max_depth"), ({"width": 0}, "width")])
def test_limits_that_make_no_sense_are_refused(limit: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        bilinear(1).best_first(5, **limit)
    with pytest.raises(ValueError, match="rows must be 0"):
        bilinear(1).child_log_probs([7])


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
        (ROWS, TOKENS, -1, ValueError, "budget"),
        (np.where(ROWS == -4, np.nan, ROWS), TOKENS, 4, ValueError, "not NaN"),
        (np.where(ROWS == -0.5, np.inf, ROWS), TOKENS, 4, ValueError, r"below \+inf"),
        (ROWS[:, ::-1].copy(), TOKENS, 4, ValueError, "fall along every row"),
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


@given(parents=trees(largest=100), roots=st.lists(st.integers(0, 99)))
def test_packed_mask(parents: np.ndarray, roots: list[int]) -> None:
    """Of a tree, or of several."""
    parents[[root for root in roots if root < len(parents)]] = -1
    mask = _native.packed_mask(parents)
    assert mask.dtype == np.int32
    np.testing.assert_array_equal(mask, reference.packed_mask(parents))


@given(parents=trees(largest=12), data=st.data(), dtype=st.sampled_from([np.int64, np.int32]))
def test_walk(parents: np.ndarray, data: st.DataObject, dtype: type) -> None:
    # Few tokens, so that paths are long and siblings may share a token.
    count = len(parents)
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=2 * count, max_size=2 * count))
    token_ids = np.array(drawn[:count], np.int32)
    choices: np.ndarray = np.array(drawn[count:], dtype)
    path = _native.walk(parents, token_ids[1:], choices)
    assert path.dtype == np.int32
    assert path.tolist() == reference.walk(parents, token_ids, choices, count)


def test_walk_compares_whole_int64_tokens() -> None:
    parents = np.array([-1, 0], np.int32)
    assert _native.walk(parents, np.array([5], np.int32), np.array([5 + 2**32, 0])).tolist() == [0]
    assert _native.walk(parents, np.array([5], np.int32), np.array([5, 0])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("parents", "text"), [([], "at least one node"), ([0], r"parents\[0\] is 0"), ([-1, 1], r"parents\[1\] is 1")]
)
def test_parents_must_be_topological(parents: list[int], text: str) -> None:
    array = np.array(parents, np.int32)
    count = len(parents)
    for call in (
        lambda: _native.packed_mask(array),
        lambda: _native.walk(array, np.zeros(max(count - 1, 0), np.int32), np.zeros(count, np.int64)),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_a_walk_has_one_root() -> None:
    with pytest.raises(ValueError, match=r"parents\[2\] is -1"):
        _native.walk(np.array([-1, 0, -1], np.int32), np.zeros(2, np.int32), np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("token_ids", "choices", "error"),
    [
        (np.zeros(6, np.int32), np.zeros(6, np.int64), ValueError),
        (np.zeros(5, np.int32), np.zeros(5, np.int64), ValueError),
        (np.zeros(5, np.int64), np.zeros(6, np.int64), TypeError),
    ],
)
def test_walk_refuses(token_ids: np.ndarray, choices: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error):
        _native.walk(BRANCHING, token_ids, choices)
