"""The contract of runtime.tree. That the heap builds the right tree is tested in test_native_tree."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import make_budgets, make_profile

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, RoundPlan, SlotInput
from ddtree_trt.runtime.tree import (
    EMPTY,
    Bilinear,
    Candidates,
    DraftTree,
    LinkedRows,
    Marginals,
    build_tree,
    chain,
    chain_parents,
    compile_tree,
    descend,
)

LOG_PROBS = np.log([[0.6, 0.32, 0.08], [0.5, 0.4, 0.1]])
TOKEN_IDS = [[7, 8, 9], [7, 5, 6]]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, vocab: int = 4) -> DraftTree:
    """Any tree whose siblings have different tokens, in any order that puts parents first."""
    children: list[set[int]] = [set()]
    tokens, parents, depths = [], [-1], [0]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.sampled_from([i for i, taken in enumerate(children) if len(taken) < vocab]))
        token = draw(st.sampled_from(sorted(set(range(vocab)) - children[parent])))
        children[parent].add(token)
        children.append(set())
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    ids, below, above = (np.array(part, np.int32) for part in (tokens, depths[1:], parents))
    return DraftTree(ids, below, above, log_weights=-np.arange(len(tokens), dtype=np.float64))


def follow(tree: DraftTree, choices: list[int]) -> list[int]:
    path = [0]
    while True:
        matching = [
            node
            for node in range(1, len(tree) + 1)
            if tree.parents[node] == path[-1] and tree.token_ids[node - 1] == choices[path[-1]]
        ]
        if not matching:
            return path
        path += matching


CHOICES = st.lists(st.integers(0, 3), min_size=13, max_size=13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ids", [np.int32, np.int64, list])
def test_build_tree_keeps_its_contract(dtype: type, ids: Any) -> None:
    log_probs: Any = np.asfortranarray(LOG_PROBS.astype(dtype))
    tree = build_tree(log_probs, TOKEN_IDS if ids is list else np.asfortranarray(np.array(TOKEN_IDS, ids)), 4)
    assert tree.token_ids.tolist() == [7, 8, 7, 5]
    assert tree.depths.tolist() == [1, 1, 2, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert np.allclose(np.exp(tree.log_weights), [0.6, 0.32, 0.3, 0.24], atol=1e-6)
    assert [a.dtype for a in (tree.token_ids, tree.depths, tree.parents)] == [np.int32] * 3
    assert tree.log_weights.dtype == np.float64


def test_a_tree_of_one_branch_and_one_of_none() -> None:
    tree = chain([4, 4, 2])
    assert tree.token_ids.tolist() == [4, 4, 2]
    assert tree.depths.tolist() == [1, 2, 3]
    assert tree.parents.tolist() == chain_parents(4).tolist() == [-1, 0, 1, 2]
    assert tree.log_weights.tolist() == [0, 0, 0]
    compiled = compile_tree(9, EMPTY)
    assert (compiled.token_ids.tolist(), compiled.parents.tolist(), compiled.depths.tolist()) == ([9], [-1], [0])


@given(tree=trees(), root=st.integers(0, 200_000))
def test_compiled_tree_has_the_root_on_top(tree: DraftTree, root: int) -> None:
    compiled = compile_tree(root, tree)
    assert len(compiled) == 1 + len(tree)
    assert compiled.token_ids.tolist() == [root, *tree.token_ids.tolist()]
    assert compiled.token_ids.dtype == np.int64
    assert compiled.depths.tolist() == [0, *tree.depths.tolist()]
    assert compiled.packed_mask.tolist() == _native.packed_mask(tree.parents).tolist()


@given(tree=trees(), choices=CHOICES, stop=st.integers(0, 9))
@settings(max_examples=300)
def test_walk_and_descend_follow_the_choices(tree: DraftTree, choices: list[int], stop: int) -> None:
    expected = follow(tree, choices)
    assert _native.walk(tree.parents, tree.token_ids, np.array(choices[: len(tree) + 1])).tolist() == expected
    asked: list[int] = []

    def choose(node: int) -> int | None:
        asked.append(node)
        return None if len(asked) > stop else choices[node]

    path = descend(tree, choose)
    assert path.tolist() == asked == expected[: stop + 1] and path.dtype == np.int32


@pytest.mark.parametrize("form", ["marginals", "bilinear", "linked"])
def test_automatic_budgets_weigh_conditionals(form: str) -> None:
    """The mass tried below a node is that of its children's conditionals; the choice is the best beginning."""
    rng = np.random.default_rng(3)
    unary = -np.sort(-rng.normal(0, 1.5, (4, 4)), axis=1).astype(np.float32)
    ids = np.stack([rng.permutation(20)[:4] for _ in range(4)]).astype(np.int32)
    pairs = Bilinear(unary, ids, *rng.normal(0, 1, (2, 4, 4, 3)).astype(np.float32))
    forms: dict[str, Candidates] = {
        "marginals": Marginals(unary - unary.max(), ids),
        "bilinear": pairs,
        "linked": LinkedRows(*pairs.child_log_probs(np.arange(13))),
    }
    of = forms[form]
    plan = RoundPlan([AutoBudget(make_budgets(make_profile(draft_s=0.2), 32, 4))], [SlotInput(0, 99)])
    (ceiling,) = plan.ceilings()
    tree = of.best_first(ceiling)
    (nodes,), (decision,) = plan.choose([tree]), plan.decisions
    assert decision is not None and 0 < nodes <= len(tree)
    assert decision.expected_tokens == pytest.approx(1 + np.exp(tree.log_weights[:nodes]).sum(), rel=1e-9)
    cut, path = tree.cut(nodes), np.array([0, 1], np.int32)
    tried = np.zeros((2, len(path)))
    _native.learn(tried, cut.parents, cut.log_weights, path, 1.0)
    row = 0
    for mass, node in zip(tried[1], path.tolist(), strict=True):
        log_probs, tokens, rows = (part[0] for part in of.child_log_probs([row]))
        among = np.isin(tokens, cut.token_ids[cut.parents[1:] == node])
        assert mass == pytest.approx(np.exp(log_probs[among], dtype=float).sum())
        row = int(rows[0])
