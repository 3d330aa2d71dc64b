"""Drafters in every dialect of published checkpoints, from their files to the drafts of an engine, against PyTorch.

What a dialect means is stated here a second time, so that the truth does not depend on the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_target
from dflash_truth import DFlash, refuse_to_draw
from drafter_dialects import SHAPE, VOCABULARY, make_dialect
from drafts import marginals
from engine_builds import build_engine
from numerics import Truth, assert_close, path_to, random_tree

from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest

TAPS, TOP_K, WINDOW = (0, 2), 10, 7
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
OWN = {"own_embedding": True, "own_head": True}
SLID = {"windows": (WINDOW, 0), "causal": (True, False)}
UNKNOWN = {"num_target_layers": None}

# Dialect, entries of config.json that differ, and of objects within it → what the drafter is.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]]] = {
    "zlab": ("zlab", {}, {}, {}),
    "zlab with windows": ("zlab", SLIDING, {}, SLID),
    "zlab with windows, not causal": ("zlab", {**SLIDING, "is_causal": False}, {}, {"windows": (WINDOW, 0)}),
    "zlab, anchor first": ("zlab", {}, {"dflash_config": {"sample_from_anchor": True}}, {"anchor_first": True}),
    "jetspec": ("jetspec", {}, {}, {"causal": (True, True)}),
    "deepspec": ("deepspec", {}, {}, {**OWN, "anchor_first": True}),
    "specforge": ("specforge", {}, {}, {"anchor_first": True}),
    "speculators": ("speculators-dflash", {}, {}, {**OWN, **UNKNOWN}),
    "speculators with windows": (
        "speculators-dflash",
        {},
        {"transformer_layer_config": SLIDING},
        {**OWN, **UNKNOWN, **SLID},
    ),
    "speculators, smaller vocabulary": (
        "speculators-dspark",
        {},
        {},
        {**OWN, **UNKNOWN, "anchor_first": True, "draft_vocab_size": VOCABULARY},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_of_each_dialect(tmp_path: Path, case: str) -> None:
    """Over several rounds, behind contexts on both sides of the window's edge."""
    dialect, changes, sections, meaning = CASES[case]
    target = make_target(tmp_path / "target")
    drafter = make_dialect(tmp_path / "drafter", dialect, changes, sections)
    engine = build_engine(target, drafter, tmp_path / "engine", max_batch=1)
    own = {"block_size": SHAPE["block_size"], "mask_token_id": SHAPE["mask_token_id"], "tap_layers": TAPS}
    dims = DFlashDims(**{**vars(TARGET_DIMS), "num_layers": 2, **own, "num_target_layers": 3, **meaning})
    assert engine.manifest.drafting.dims == dims

    truth = Truth(target, TAPS)
    dflash, rng = DFlash(drafter, dims, truth), np.random.default_rng(5)
    tokens = rng.integers(0, TARGET_DIMS.vocab_size - 1, WINDOW - 2).tolist()
    engine.prefill(0, np.array(tokens), rows="none", taps=True)
    for _ in range(5):
        bonus = int(rng.integers(50))
        draft = marginals(engine.draft([DraftRequest(0, bonus, TOP_K, 1, refuse_to_draw)])[0])
        expected = dflash(truth(tokens)[1], bonus)
        assert draft.log_probs.shape == (dims.draft_length, TOP_K)
        assert_close(draft.log_probs, -np.sort(-expected, axis=-1)[:, :TOP_K], f"{case} behind {len(tokens)}")
        assert_close(draft.log_probs, np.take_along_axis(expected, draft.token_ids, axis=-1), f"{case}, by token")
        tree = random_tree(rng, 6, TARGET_DIMS.vocab_size)
        path = path_to(tree, int(np.argmax(tree.depths)))
        engine.verify([VerifyRequest(0, tree)])
        engine.commit(0, path, taps=True)
        tokens += tree.token_ids[path].tolist()
