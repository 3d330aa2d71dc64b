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
from engine_builds import CAUSAL, INSTALLED, build_engine, build_torch_engine
from numerics import Measured, Truth, assert_close, path_to, random_tree

from ddtree_trt.models.drafters.dflash import Convolution, Selector
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
    # The version whose attention kernel the graph is made for; the installed one runs it.
    **{v: functools.partial(build_engine, onnxruntime=v) for v in sorted({INSTALLED, CAUSAL})},
    "torch": build_torch_engine,
}


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Callable[..., Measured]:
    return BUILDS[request.param]


def drafted(engine: Measured, bonus: int) -> Bilinear:
    (draft,) = engine.draft([DraftRequest(0, bonus, 5, 1, refuse_to_draw)])
    assert isinstance(draft.candidates, Bilinear)
    return draft.candidates


def check(found: Bilinear, dflash: DFlash, states: np.ndarray, bonus: int) -> None:
    """The candidates of every position are the largest logits, and every pair's score is the plain statement's."""
    hidden = dflash.hidden(states, bonus)
    assert len(found.unary) == len(hidden) == dflash.dims.draft_length
    logits = dflash.logits(hidden).numpy()
    count = found.unary.shape[1]
    assert_close(found.unary, -np.sort(-logits, axis=-1)[:, :count], "unary scores")
    offsets = dflash.w["d2t"].numpy() if dflash.dims.draft_vocab_size else np.zeros(dflash.dims.vocab_size)
    of_target = {int(i + offset): i for i, offset in enumerate(offsets)}  # target's id → draft id
    for position, ids in enumerate(found.token_ids):
        draft_ids = [of_target[token] for token in ids.tolist()]
        assert_close(found.unary[position], logits[position, draft_ids], "unary scores by token")
        assert len(set(ids.tolist())) == count
        parents = [bonus] if position == 0 else found.token_ids[position - 1].tolist()
        for i, parent in enumerate(parents):
            scores = found.unary[position] + found.right[position] @ found.left[position, i]
            expected = dflash.scores(hidden, position, parent).numpy()[draft_ids]
            assert_close(scores, expected, f"position {position} after {parent}")


@pytest.mark.parametrize("shape", SHAPES)
def test_rounds(shape: str, build: Callable[..., Measured], tmp_path: Path) -> None:
    """Over a prompt and rounds of uneven length."""
    target = make_target(tmp_path / "target")
    dims = make_variant(tmp_path / "drafter", **SHAPES[shape])
    with reading_variant(tmp_path / "drafter", dims):
        engine = build(target, tmp_path / "drafter", tmp_path / "engine")
    assert engine.manifest.dflash == dims
    truth = Truth(target, dims.tap_layers)
    dflash = DFlash(tmp_path / "drafter", dims, truth)
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
