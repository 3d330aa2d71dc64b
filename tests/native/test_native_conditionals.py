"""Trees of conditionals: the native heap over linked rows and bilinear forms against every prefix there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt.runtime.candidates import NO_ROW, Bilinear, Candidates, LinkedRows, Marginals
from ddtree_trt.runtime.tree import DraftTree, best_tree

TIED = st.sampled_from([0.0, -0.5, -1.0, -2.0, -np.inf])  # sums are exact and often equal
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def linked_rows(draw: st.DrawFn) -> LinkedRows:
    """Up to four rows of up to three candidates; several candidates may share a row."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    values = [sorted((draw(TIED) for _ in range(width)), reverse=True) for _ in range(rows)]
    links = [[draw(st.sampled_from([NO_ROW, *range(r + 1, rows)])) for _ in range(width)] for r in range(rows)]
    ids = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    return LinkedRows(np.array(values, np.float32), ids, np.array(links, np.int32))


def bilinear(seed: int, length: int = 3, count: int = 3, rank: int = 5, spread: float = 1.0) -> Bilinear:
    rng = np.random.default_rng(seed)
    unary = -np.sort(-rng.normal(0, spread, (length, count)), axis=1)
    ids = np.stack([rng.permutation(50)[:count] for _ in range(length)]) if length else np.zeros((0, count))
    left, right = rng.normal(0, spread, (2, length, count, rank))
    return Bilinear(unary.astype(np.float32), ids.astype(np.int32), left.astype(np.float32), right.astype(np.float32))


def prefixes(candidates: Candidates, row: int = 0, max_depth: int = 99) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(weight, ranks) of every possible prefix, walked row by row."""
    if candidates.empty or row == NO_ROW or not max_depth:
        return
    log_probs, _, rows = (part[0].tolist() for part in candidates.child_log_probs([row]))
    for rank, (weight, below) in enumerate(zip(log_probs, rows, strict=True)):
        if weight > -np.inf:
            yield weight, (rank,)
            yield from ((weight + w, (rank, *ranks)) for w, ranks in prefixes(candidates, below, max_depth - 1))


def nodes(candidates: Candidates, tree: DraftTree) -> list[tuple[float, tuple[int, ...]]]:
    """(−weight, ranks) of a tree's nodes in its order; checks tokens and depths on the way."""
    places: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # the row of a node's children, and its ranks
    for node, parent in enumerate(tree.parents[1:].tolist()):
        row, ranks = places[parent]
        _, token_ids, rows = (part[0] for part in candidates.child_log_probs([row]))
        (rank,) = np.flatnonzero(token_ids == tree.token_ids[node]).tolist()
        places.append((int(rows[rank]), (*ranks, rank)))
        assert tree.depths[node] == len(ranks) + 1
    return list(zip((-tree.log_weights).tolist(), [ranks for _, ranks in places[1:]], strict=True))


def assert_best(candidates: Candidates, max_depth: int | None = None) -> None:
    """For every budget from none to past the end: the first of all prefixes by (−weight, ranks)."""
    every = sorted((-w, ranks) for w, ranks in prefixes(candidates, max_depth=99 if max_depth is None else max_depth))
    largest = best_tree(candidates, len(every) + 2, max_depth=max_depth)
    for budget in range(len(every) + 3):
        tree = best_tree(candidates, budget, max_depth=max_depth)
        found = nodes(candidates, tree)
        assert [ranks for _, ranks in found] == [ranks for _, ranks in every[:budget]]
        np.testing.assert_allclose([w for w, _ in found], [w for w, _ in every[:budget]], rtol=1e-12)
        cut = largest.cut(budget)
        for name in ("token_ids", "depths", "parents", "log_weights"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(tree, name))


@given(candidates=linked_rows(), max_depth=st.sampled_from([None, 0, 1, 2]))
def test_trees_of_linked_rows_are_the_first_of_all_prefixes(candidates: LinkedRows, max_depth: int | None) -> None:
    assert_best(candidates, max_depth)


@given(seed=SEEDS, max_depth=st.sampled_from([None, 0, 1, 2]))
def test_trees_of_bilinear_forms_are_the_first_of_all_prefixes(seed: int, max_depth: int | None) -> None:
    assert_best(bilinear(seed), max_depth)


@given(seed=SEEDS, budget=st.integers(0, 39))
def test_no_other_prefixes_have_more_mass(seed: int, budget: int) -> None:
    """Probabilities from the definition, in float64."""
    form = bilinear(seed)
    masses = []
    for depth in (1, 2, 3):
        for path in itertools.product(range(3), repeat=depth):
            before, mass = 0, 1.0
            for t, b in enumerate(path):
                mass *= conditional(form, t, before)[b]
                before = b
            masses.append(mass)
    tree = best_tree(form, budget)
    assert np.exp(tree.log_weights).sum() == pytest.approx(sum(sorted(masses, reverse=True)[:budget]), rel=1e-5)


def conditional(form: Bilinear, t: int, before: int) -> np.ndarray:
    """float64 [C]: the distribution at position t after candidate `before` of the one above."""
    scores = form.unary[t].astype(np.float64) + form.right[t].astype(np.float64) @ form.left[t, before]
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(("rank", "count"), [(0, 2), (1, 1), (16, 5), (37, 16), (256, 16)])
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


def test_a_form_without_products_has_the_trees_of_its_marginals() -> None:
    form = bilinear(5, length=4, count=4, rank=0)
    log_probs = np.stack([np.log(conditional(form, t, 0)) for t in range(4)]).astype(np.float32)
    found, expected = best_tree(form, 30), best_tree(Marginals(log_probs, form.token_ids), 30)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.parents.tolist() == expected.parents.tolist()


def test_the_anchor_decides_the_first_position_alone() -> None:
    form = bilinear(7)
    other = np.copy(form.left)
    other[0, 1:] += 5
    changed = Bilinear(form.unary, form.token_ids, other, form.right)
    assert best_tree(changed, 39).token_ids.tolist() == best_tree(form, 39).token_ids.tolist()


@pytest.mark.parametrize("width", [1, 2])
def test_a_width_limits_the_children_of_every_node(width: int) -> None:
    form = bilinear(9, length=4, count=4)
    every = sorted((-w, ranks) for w, ranks in prefixes(form) if max(ranks) < width)
    tree = best_tree(form, 500, width=width)
    assert [ranks for _, ranks in nodes(form, tree)] == [ranks for _, ranks in every]
    if width == 1:
        assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


EMPTY: list[Candidates] = [
    Marginals(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.int32)),
    LinkedRows(np.zeros((2, 0), np.float32), np.zeros((2, 0), np.int32), np.zeros((2, 0), np.int32)),
    bilinear(0, length=0),
    bilinear(0, length=2, count=0),
]


@pytest.mark.parametrize("candidates", EMPTY)
def test_nothing_grows_of_no_candidates(candidates: Candidates) -> None:
    assert candidates.empty and len(best_tree(candidates, 5)) == 0


def test_impossible_candidates_never_enter() -> None:
    form = bilinear(0, length=2, count=2, rank=1)
    unary = np.array([[0, -np.inf], [-np.inf, -np.inf]], np.float32)
    tree = best_tree(Bilinear(unary, form.token_ids, form.left, form.right), 9)
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
        (changed(bilinear(1), "unary", np.inf, (0, 0)), "unary must be below"),
        (changed(bilinear(1), "unary", 99, (0, 2)), "unary must fall"),
        (changed(bilinear(1), "left", np.nan, (0, 0, 0)), "conditional scores"),
        (changed(bilinear(1), "right", np.nan, (2, 1, 4)), "conditional scores"),
        (replace(bilinear(1), right=np.zeros((3, 3, 4), np.float32)), "right must have the shape of left"),
        (linked([[0], [0]], [[0], [NO_ROW]]), "next_rows must be -1 or .* later row"),
        (linked([[0], [0]], [[2], [NO_ROW]]), "next_rows"),
        (linked([[0], [0]], [[-2], [NO_ROW]]), "next_rows"),
        (linked([[-1, 0]], [[NO_ROW, NO_ROW]]), "log_probs must fall"),
        (linked([[np.nan]], [[NO_ROW]]), "not NaN"),
    ],
)
def test_candidates_that_cannot_be_used_are_refused(candidates: Candidates, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        best_tree(candidates, 50)


@pytest.mark.parametrize(("limit", "text"), [({"max_depth": -1}, "max_depth"), ({"width": 0}, "width")])
def test_limits_that_make_no_sense_are_refused(limit: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        best_tree(bilinear(1), 5, **limit)
    with pytest.raises(ValueError, match="rows must be 0"):
        bilinear(1).child_log_probs([7])
