"""A drafter that drafts from a shortlist of the target's tokens, and brings no head for it: rows of the target's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, edit_json, make_drafter, make_target
from drafts import marginals
from engine_builds import build_engine, build_torch_engine
from safetensors.numpy import load_file, save_file

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.drafters.tapped import OWN_HEAD, TO_TARGET
from ddtree_trt.models.decoder import EMBEDDING, HEAD
from ddtree_trt.runtime.engines.base import DraftRequest, Engine

TOP_K, SIZE = 8, 30
BUILDS: dict[str, Callable[..., Engine]] = {
    "onnxruntime": build_engine,
    "int8": partial(build_engine, precision="int8"),
    "torch": build_torch_engine,
}


def shorten(drafter: Path, ids: np.ndarray, head: np.ndarray | None = None) -> None:
    """Have a drafter draft from the tokens `ids`, with a head of its own or without."""
    file = drafter / "model.safetensors"
    weights = {**load_file(file), TO_TARGET: ids - np.arange(len(ids))}
    save_file(weights if head is None else {**weights, OWN_HEAD: head}, file)
    edit_json(drafter / "config.json", draft_vocab_size=len(ids))


def draft_behind(engine: Engine, tokens: list[int], bonus: int) -> Any:
    engine.prefill(0, np.array(tokens), rows="none", taps=True)
    (draft,) = engine.draft([DraftRequest(0, bonus, TOP_K, 99)])
    return marginals(draft)


@pytest.mark.parametrize(("build", "tied"), [("onnxruntime", False), ("int8", True), ("torch", True)])
def test_the_head_is_rows_of_the_targets(build: str, tied: bool, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tied=tied)
    ids = np.sort(np.random.default_rng(0).permutation(TARGET_DIMS.vocab_size)[:SIZE])
    rows = load_checkpoint(target).tensor(EMBEDDING if tied else HEAD)[ids]
    tokens = np.random.default_rng(1).integers(0, TARGET_DIMS.vocab_size, 20).tolist()
    found = []
    for name, head in (("borrowed", None), ("own", rows)):
        drafter = make_drafter(tmp_path / name)
        shorten(drafter, ids, head)
        engine = BUILDS[build](target, drafter, tmp_path / f"engine-{name}", max_batch=1)
        assert engine.manifest.drafting.dims.own_head and engine.manifest.drafting.dims.draft_vocab_size == SIZE
        found.append(draft_behind(engine, tokens, 7))
        engine.close()
    borrowed, own = found
    np.testing.assert_array_equal(borrowed.token_ids, own.token_ids)
    np.testing.assert_array_equal(borrowed.log_probs, own.log_probs)
    assert set(borrowed.token_ids.ravel().tolist()) <= set(ids.tolist())
