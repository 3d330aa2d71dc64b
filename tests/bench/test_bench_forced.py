"""Forced acceptance, and the random pairs it is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine
from scripted_models import MarkovTarget, Useless

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.pairs.forced import ForcedEngine, forced_path, unmatched_token
from ddtree_trt.bench.pairs.random_pair import SHAPES, find_shape, random_engine
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.tree import DraftTree, compile_tree, walk

# root -> 1 -> {2 -> 4, 3}, root -> 5, with two nodes of one token
PARENTS = np.array([-1, 0, 1, 1, 2, 0], np.int32)
DEPTHS = np.array([1, 2, 2, 3, 1], np.int32)
TOKENS = np.array([3, 1, 2, 3, 1], np.int32)


def test_the_path_goes_to_the_first_node_of_its_depth() -> None:
    depths = [0, *DEPTHS.tolist()]
    assert [forced_path(PARENTS.tolist(), depths, n) for n in range(5)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 4],
        [0, 1, 2, 4],  # the tree is not deeper
    ]


def test_the_token_after_the_path_has_no_child_and_is_not_banned() -> None:
    assert unmatched_token({1, 2}, 5, frozenset()) == 5
    assert unmatched_token({0, 5}, 5, frozenset({1})) == 2


@given(accepted=st.integers(0, 5), vocabulary_seed=st.integers(0, 50))
def test_the_walk_accepts_exactly_what_is_forced(accepted: int, vocabulary_seed: int) -> None:
    inner = ScriptedEngine(MarkovTarget(seed=vocabulary_seed), Useless(6))
    engine = ForcedEngine(inner, 1 + accepted, banned=frozenset({0}))
    engine.prefill(0, np.array([1], np.int64), rows="none", taps=True)
    tree = DraftTree(TOKENS, DEPTHS, PARENTS, np.zeros(5))
    (verdict,) = engine.verify([VerifyRequest(0, compile_tree(4, tree))])
    path = walk(tree, verdict.choices)
    assert len(path) == 1 + min(accepted, 3)
    assert verdict.choices[path[-1]] != 0
    engine.commit(0, path, taps=True)
    assert engine.length(0) == engine.draftable_length(0) == 1 + len(path)
    engine.truncate(0, 0)
    assert inner.length(0) == 0


def test_the_targets_logits_are_left_alone() -> None:
    inner = ScriptedEngine(MarkovTarget(), Useless(6))
    inner.prefill(0, np.array([1], np.int64), rows="none", taps=True)
    tree = compile_tree(2, DraftTree(TOKENS, DEPTHS, PARENTS, np.zeros(5)))
    expected = np.array(inner.verify([VerifyRequest(0, tree)])[0].logits)
    (verdict,) = ForcedEngine(inner, 3).verify([VerifyRequest(0, tree)])
    np.testing.assert_array_equal(verdict.logits, expected)


def test_a_random_pair_commits_what_is_forced() -> None:
    result = run_bench(
        BenchSettings(
            "micro", random_weights=True, forced_acceptance=3, budgets=(16,), limit=1, max_tokens=13, prompt_tokens=20
        )
    )
    lengths = {s.case: s.acceptance_lengths for s in result.samples}
    assert lengths == {"ar": (1,) * 12, "dflash": (3,) * 4, "ddtree@16": (3,) * 4}
    assert {s.output_tokens for s in result.samples} == {13}  # no stop token ends it
    outputs = {s.case: s.output_digest for s in result.samples}
    assert outputs["dflash"] == outputs["ddtree@16"]  # the spine is in the tree


def test_without_forcing_a_random_drafter_is_hardly_ever_right() -> None:
    chosen = BenchSettings("micro", random_weights=True, budgets=(8,), limit=1, max_tokens=13, prompt_tokens=20)
    result = run_bench(chosen)
    lengths = [a for s in result.samples if s.case == "ddtree@8" for a in s.acceptance_lengths or ()]
    assert np.mean(lengths) < 2
    assert len({s.output_digest for s in result.samples}) == 1  # lossless all the same


def test_random_trees_have_the_depth_of_real_ones() -> None:
    """Else forcing would find no path: a flat distribution gives a bush of depth 1."""
    result = run_bench(
        BenchSettings("micro", random_weights=True, forced_acceptance=7, budgets=(32,), limit=2, max_tokens=30)
    )
    lengths = [a for s in result.samples if s.case == "ddtree@32" for a in s.acceptance_lengths or ()]
    assert np.mean(lengths) > 4


@pytest.mark.parametrize(("backend", "precision"), [("onnxruntime", "int8"), ("torch", "bf16")])
def test_a_random_pair_in_another_precision(backend: str, precision: str) -> None:
    settings = BenchSettings(
        "micro",
        random_weights=True,
        backend=backend,
        precision=precision,
        forced_acceptance=3,
        budgets=(16,),
        limit=1,
        max_tokens=13,
        prompt_tokens=20,
    )
    result = run_bench(settings)
    assert (result.engine.backend, result.engine.precision) == (backend, precision)
    assert {s.acceptance_lengths for s in result.samples if s.case == "ddtree@16"} == {(3,) * 4}


def test_a_precision_the_backend_has_not() -> None:
    settings = BenchSettings("micro", random_weights=True, precision="bf16", limit=1)
    with pytest.raises(UsageError, match="the onnxruntime backend computes in fp32, int8"):
        run_bench(settings)


def test_a_random_engine_is_gone_afterwards() -> None:
    settings = BenchSettings("micro", random_weights=True, prompt_tokens=8, max_tokens=8, budgets=(4,))
    with random_engine(settings, lambda stage, done, total: None) as folder:
        manifest = load_manifest(folder / "engine")
        assert manifest.limits.max_seq_len == 16
        assert manifest.name == "random-micro"
    assert not folder.exists()


def test_shapes_are_those_of_published_models() -> None:
    with pytest.raises(UsageError, match=r"known are micro, qwen3-0\.6b"):
        find_shape("qwen9")
    for name in set(PRESETS) & set(SHAPES):
        assert SHAPES[name].target.num_layers == SHAPES[name].drafter.num_target_layers
    small = SHAPES["qwen3-0.6b"].target
    assert (small.hidden_size, small.num_layers, small.num_heads, small.num_kv_heads) == (1024, 28, 16, 8)
