"""A target over two processes against the same target in one: every family, prompts, branching trees, compaction, and
rounds behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_pair
from drafts import marginals
from engine_builds import build_torch_engine
from numerics import assert_close, path_to, random_tree
from ranks import TwoRanks

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.models.families import FAMILIES
from ddtree_trt.runtime.engines.base import DraftRequest, Engine, VerifyRequest
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine

SHAPES: dict[str, dict[str, Any]] = {
    **{family: {"family": FAMILIES[family], "tied": family in ("llama", "qwen2")} for family in FAMILIES},
    "tied": {"tied": True},
    "one head of keys and values": {"num_kv_heads": 1},
    "an odd vocabulary": {"vocab_size": 97, "tied": False},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def results(engine: Engine, seed: int) -> Iterator[tuple[str, Any]]:
    """Two slots through a prompt, then through rounds with branching trees, whose deepest path is committed."""
    rng, vocabulary = np.random.default_rng(seed), engine.manifest.target_dims.vocab_size
    sizes = (9, 14)
    for slot, size in enumerate(sizes):
        verdict = engine.prefill(slot, rng.integers(0, vocabulary, size), rows="all", taps=True)
        yield f"prompt {slot}", (verdict.choices, np.asarray(verdict.logits))
    for number in range(3):
        drafts = engine.draft([DraftRequest(slot, 5 + slot, 40, 3) for slot in range(len(sizes))])
        for slot, draft in enumerate(drafts):
            found = marginals(draft)
            yield f"draft {number} {slot}", (found.token_ids, found.log_probs)
        trees = [random_tree(rng, nodes, vocabulary) for nodes in (11, 7)]
        verdicts = engine.verify([VerifyRequest(slot, tree) for slot, tree in enumerate(trees)])
        for slot, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            yield f"tree {number} {slot}", (verdict.choices, np.asarray(verdict.logits))
            yield f"row {number} {slot}", (verdict.choices[-1:], verdict.logits[-1])
            engine.commit(slot, path_to(tree, int(tree.depths.argmax())), taps=True)
    engine.truncate(1, 4)
    verdict = engine.prefill(1, rng.integers(0, vocabulary, 5), rows="last", taps=False)
    yield "behind a prefix", (verdict.choices, np.asarray(verdict.logits))
    assert (engine.length(1), engine.draftable_length(1)) == (9, 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_compute_what_one_does(shape: str, ranks: TwoRanks, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **SHAPES[shape])
    one = build_torch_engine(*pair, tmp_path / "e", max_batch=2, max_seq_len=96)
    with ranks.open(tmp_path / "e") as two:
        for (name, expected), (_, found) in zip(results(one, 7), results(two, 7), strict=True):
            np.testing.assert_array_equal(found[0], expected[0], err_msg=name)
            assert_close(found[1], expected[1], name)
    one.close()


def test_a_rank_holds_its_part_of_what_is_split(ranks: TwoRanks, tmp_path: Path) -> None:
    """Of weights and caches. The rest of the target is norms and what chooses experts."""
    pair = make_pair(tmp_path, family=FAMILIES["qwen3_moe"], tied=False)
    one = build_torch_engine(*pair, tmp_path / "e", max_batch=2, max_seq_len=96)
    with ranks.open(tmp_path / "e") as two:
        assert isinstance(two, ParallelEngine)
        part = two._engine
        whole = one.target.network
        assert 2 * part.target.network.embedding.numel() == whole.embedding.numel()
        assert 2 * part.target.network.head.numel() == whole.head.numel()
        assert 2 * part.target.cache.slab.numel() == one.target.cache.slab.numel()
        assert 2 * part.target.logits.numel() == one.target.logits.numel()
        for held, full in zip(part.target.network._decoder.layers, whole._decoder.layers, strict=True):
            for name in ("qkv", "o", "gate_up", "down"):
                assert 2 * getattr(held, name).numel() == getattr(full, name).numel()
    one.close()
    assert load_manifest(tmp_path / "e").target_dims == one.manifest.target_dims
