"""Heads whose children depend on their parent, and convolutions, against plain statements of their sources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_target, make_variant, reading_variant
from dflash_truth import DFlash, refuse_to_draw
from engine_builds import build_engine, build_torch_engine
from numerics import Measured, Truth, assert_close, path_to, random_tree

from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.runtime.candidates import Bilinear
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest

ROUNDS = ((0,), (11,), (1, 6))  # nodes whose paths are committed between drafts
SHAPES: dict[str, dict[str, Any]] = {
    "markov": {"markov_rank": 8},
    "markov-gated": {"markov_rank": 8, "markov_gated": True, "block_size": 7},
    "selector": {"selector": Selector(top=16, rank=12), "block_size": 6},
    "convolution": {"selector": Selector(top=4, rank=6), "convolution": Convolution(taps=2, groups=4), "block_size": 8},
    # More taps than rows: the last of them reach no row of the block.
    "long-convolution": {"markov_rank": 3, "convolution": Convolution(taps=6, groups=32), "block_size": 4},
    "scaled": {
        "selector": Selector(top=16, rank=6),
        "convolution": Convolution(taps=3, groups=2),
        "block_size": 16,
        "embedding_scale": 0.5,
        "logit_scale": 0.7,
        "logit_cap": 5.0,
        "num_layers": 3,
    },
    "dspark": {"markov_rank": 5, "block_size": 7, "anchor_first": True, "own_embedding": True, "own_head": True},
    "draft-ids": {"markov_rank": 5, "anchor_first": True, "own_head": True, "draft_vocab_size": 70},
    "dflash2": {
        "selector": Selector(top=16, rank=6),
        "convolution": Convolution(taps=2, groups=8),
        "block_size": 16,
        "windows": (12, 12),
        "causal": (True, False),
    },
}
BUILDS: dict[str, Callable[..., Measured]] = {
    "onnxruntime": build_engine,
    "torch": build_torch_engine,
}


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Callable[..., Measured]:
    return BUILDS[request.param]


def drafted(engine: Measured, bonus: int) -> Bilinear:
    (draft,) = engine.draft([DraftRequest(0, bonus, 5, 1, refuse_to_draw)])
    assert isinstance(draft.candidates, Bilinear)
    return draft.candidates


def ids_of_head(found: Bilinear, dflash: DFlash) -> list[list[int]]:
    """The candidates [L, C] by the ids of the drafter's head."""
    offsets = dflash.w["d2t"].numpy() if dflash.dims.draft_vocab_size else np.zeros(dflash.dims.vocab_size)
    of_target = {int(i + offset): i for i, offset in enumerate(offsets)}
    return [[of_target[token] for token in ids] for ids in found.token_ids.tolist()]


def check(found: Bilinear, dflash: DFlash, states: np.ndarray, bonus: int) -> None:
    """The candidates of every position are the largest logits, and every pair's score is the plain statement's."""
    hidden = dflash.hidden(states, bonus)
    assert len(found.unary) == len(hidden) == dflash.dims.draft_length
    logits = dflash.logits(hidden).numpy()
    count = found.unary.shape[1]
    assert_close(found.unary, -np.sort(-logits, axis=-1)[:, :count], "unary scores")
    for position, draft_ids in enumerate(ids_of_head(found, dflash)):
        assert_close(found.unary[position], logits[position, draft_ids], "unary scores by token")
        assert len(set(draft_ids)) == count
        parents = [bonus] if position == 0 else found.token_ids[position - 1].tolist()
        for i, parent in enumerate(parents):
            scores = found.unary[position] + found.right[position] @ found.left[position, i]
            expected = dflash.scores(hidden, position, parent).numpy()[draft_ids]
            assert_close(scores, expected, f"position {position} after {parent}")


def built(shape: str, build: Callable[..., Measured], path: Path) -> tuple[Measured, Truth, DFlash]:
    """An engine, and the plain statements of its target and of its drafter."""
    target = make_target(path / "target")
    dims = make_variant(path / "drafter", **SHAPES[shape])
    with reading_variant(path / "drafter", dims):
        engine = build(target, path / "drafter", path / "engine")
    assert engine.manifest.drafting.dims == dims
    truth = Truth(target, dims.tap_layers)
    return engine, truth, DFlash(path / "drafter", dims, truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_rounds(shape: str, build: Callable[..., Measured], tmp_path: Path) -> None:
    """Over a prompt and rounds of uneven length."""
    engine, truth, dflash = built(shape, build, tmp_path)
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, TARGET_DIMS.vocab_size - 1, 9).tolist()
    engine.prefill(0, np.array(tokens, np.int64), rows="none", taps=True)
    for nodes in ROUNDS:
        bonus = int(rng.integers(50))
        check(drafted(engine, bonus), dflash, truth(tokens)[1], bonus)
        for node in nodes:
            tree = random_tree(rng, 12, TARGET_DIMS.vocab_size)
            path = path_to(tree, node)
            engine.verify([VerifyRequest(0, tree)])
            engine.commit(0, path, taps=True)
            tokens += tree.token_ids[path].tolist()


@pytest.mark.parametrize("shape", ["markov-gated", "dspark", "draft-ids", "dflash2"])
def test_in_8_bits_too(shape: str, tmp_path: Path) -> None:
    """To 8 bits' rounding: the candidates' unary scores, and what pairs of them add, whose weights are not rounded but
    whose hidden states are."""
    engine, truth, dflash = built(shape, functools.partial(build_engine, precision="int8"), tmp_path)
    tokens = np.random.default_rng(11).integers(0, TARGET_DIMS.vocab_size - 1, 30)
    engine.prefill(0, tokens, rows="none", taps=True)
    found = drafted(engine, 7)
    hidden = dflash.hidden(truth(tokens.tolist())[1], 7)
    logits, draft_ids = dflash.logits(hidden).numpy(), np.array(ids_of_head(found, dflash))
    assert_near(found.unary, np.take_along_axis(logits, draft_ids, axis=-1), logits.std())
    assert np.abs(found.unary - np.take_along_axis(logits, draft_ids, axis=-1)).max() > 1e-4  # it is in 8 bits
    before = [[7] * draft_ids.shape[1], *found.token_ids[:-1].tolist()]
    added = np.array(
        [
            [dflash.scores(hidden, t, parent).numpy()[ids] - logits[t, ids] for parent in before[t]]
            for t, ids in enumerate(draft_ids)
        ]
    )
    assert_near(np.einsum("lar,lbr->lab", found.left, found.right), added, added.std())


def assert_near(found: np.ndarray, expected: np.ndarray, spread: float) -> None:
    """The bounds of drafts in 8 bits."""
    error = np.abs(found - expected)
    assert error.max() < 0.6 * spread and error.mean() < 0.2 * spread
