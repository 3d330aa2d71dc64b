"""Rotated networks compute what the checkpoint does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BY_SWITCHES, make_pair
from dflash_truth import DFlash
from drafts import marginals
from engine_builds import build_engine
from hypothesis import given
from hypothesis import strategies as st
from numerics import Array, Follower, Truth, path_to, random_tree

from ddtree_trt.build.graph.lowering_onnxruntime import OnnxRuntimeGraph
from ddtree_trt.build.graph.rotation import rotate, rotation_matrix
from ddtree_trt.runtime.engines.base import DraftRequest


@given(st.integers(1, 80))
def test_the_matrix_is_orthogonal_and_spreads_every_value(size: int) -> None:
    matrix = rotation_matrix(size).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    assert np.abs(matrix).max() <= np.sqrt(2 / size) * (1 + 1e-6)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_parts_of_rows_are_multiplied_by_the_matrix(size: int, parts: int, rows: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, parts * size), dtype=np.float32)
    expected = np.concatenate([part @ rotation_matrix(size) for part in np.split(x, parts, axis=1)], axis=1)
    np.testing.assert_allclose(rotate(x, size), expected, atol=2e-5)


class RotatedTruth(Truth):
    """A target whose hidden states are stated rotated."""

    def __call__(self, tokens: Any) -> tuple[Array, Array]:
        logits, taps = super().__call__(tokens)
        return logits, rotate(taps, self.model.config.hidden_size)


@pytest.fixture
def rotating(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 engines are built of rotated networks, so that nothing but the rotation is between them and the truth."""
    monkeypatch.setattr(OnnxRuntimeGraph, "rotates", True)


@pytest.mark.usefixtures("rotating")
@pytest.mark.parametrize(
    "shape",
    [{"tied": True}, {"tied": False}, *({"family": f} for f in BY_SWITCHES.values())],
    ids=["tied", "untied", *BY_SWITCHES],
)
def test_a_rotated_network_computes_the_same(shape: dict[str, Any], tmp_path: Path) -> None:
    """Logits of prefills and branching trees, the states that are handed to the drafter, and what it makes of them."""
    target, drafter = make_pair(tmp_path / "pair", **shape)
    with closing(build_engine(target, drafter, tmp_path / "engine")) as engine:
        truth = Truth(target, engine.manifest.drafting.dims.tap_layers)
        follower = Follower(engine, 0, RotatedTruth(target, engine.manifest.drafting.dims.tap_layers))
        rng = np.random.default_rng(5)
        follower.prefill(rng.integers(0, 90, 20))
        tree = random_tree(rng, 9, 90)
        follower.verify(tree)
        follower.commit(path_to(tree, int(tree.depths.argmax())))
        (draft,) = engine.draft([DraftRequest(0, 7, 20, 1)])
        log_probs = DFlash(drafter, engine.manifest.drafting.dims, truth)(truth(follower.tokens)[1], 7)
        expected = np.take_along_axis(log_probs, marginals(draft).token_ids.astype(np.int64), 1)
        np.testing.assert_allclose(marginals(draft).log_probs, expected, atol=1e-4 * expected.std())
