"""The DFlash drafter against a plain statement of it in PyTorch, over rounds of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import BY_SWITCHES, SCALINGS, TARGET_DIMS, make_drafter, make_target
from dflash_truth import DFlash, refuse_to_draw
from drafts import marginals
from engine_builds import PACKAGED, build_engine, build_torch_engine
from numerics import Measured, Truth, assert_close, path_to, random_tree

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine

CHUNK = Limits.prefill_chunk
TOP_K = 20
SHAPES: dict[str, dict[str, Any]] = {
    "block-4": {"block_size": 4, "tap_layers": (1,), "num_layers": 1},
    "block-8": {"block_size": 8, "num_heads": 8, "num_kv_heads": 1, "intermediate_size": 40, "rope_theta": 1e6},
    "block-16": {"block_size": 16, "tap_layers": (0, 1, 2), "num_layers": 3, "head_dim": 32, "rms_norm_eps": 1e-5},
    **{name: {"family": family} for name, family in BY_SWITCHES.items()},  # its layers; the target's are Qwen3's
    **{f"rope-{name}": {"rope_scaling": scaling} for name, scaling in SCALINGS.items()},
}


class Slot:
    """One slot of an engine and the tokens committed to it; its drafts are compared, the target's word is taken."""

    def __init__(self, engine: Measured, slot: int, truth: Truth, dflash: DFlash) -> None:
        self.engine, self.slot, self.truth, self.dflash = engine, slot, truth, dflash
        self.tokens: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.engine.prefill(self.slot, np.array(tokens, np.int64), rows="none", taps=True)

    def commit(self, rng: np.random.Generator, *nodes: int) -> None:
        """Commit a path of a random tree for each of `nodes`."""
        for node in nodes:
            tree = random_tree(rng, 12, TARGET_DIMS.vocab_size)
            path = path_to(tree, node)
            self.engine.verify([VerifyRequest(self.slot, tree)])
            self.engine.commit(self.slot, path, taps=True)
            self.tokens += tree.token_ids[path].tolist()

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.engine.truncate(self.slot, length)

    def draft(self, bonus: int = 3) -> None:
        (draft,) = self.engine.draft([DraftRequest(self.slot, bonus, TOP_K, 1, refuse_to_draw)])
        found, expected = marginals(draft), self.dflash(self.truth(self.tokens)[1], bonus)
        what = f"draft behind {len(self.tokens)}"
        assert_close(found.log_probs, -np.sort(-expected, axis=-1)[:, :TOP_K], what)
        assert_close(found.log_probs, np.take_along_axis(expected, found.token_ids, axis=-1), f"{what}, by token")
        assert all(len(set(row)) == TOP_K for row in found.token_ids.tolist())


BUILDS: dict[str, Callable[..., Measured]] = {
    "onnxruntime": build_engine,
    "torch": build_torch_engine,
}


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Callable[..., Measured]:
    return BUILDS[request.param]


@pytest.fixture(scope="module", params=["tiny", *SHAPES])
def slots(
    request: pytest.FixtureRequest, build: Callable[..., Measured], tmp_path_factory: pytest.TempPathFactory
) -> list[Slot]:
    path = tmp_path_factory.mktemp("drafter")
    target, drafter = PACKAGED / "target", PACKAGED / "drafter"
    if request.param != "tiny":
        target = make_target(path / "target", tied=request.param != "block-8", max_positions=4 * CHUNK)
        drafter = make_drafter(path / "drafter", max_positions=4 * CHUNK, **SHAPES[request.param])
    engine = build(target, drafter, path / "engine", max_batch=2)
    dims = engine.manifest.drafting.dims
    truth = Truth(target, dims.tap_layers)
    dflash = DFlash(drafter, dims, truth)
    return [Slot(engine, slot, truth, dflash) for slot in range(2)]


@pytest.fixture
def slot(slots: list[Slot]) -> Slot:
    slots[0].truncate(0)
    return slots[0]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def some_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, TARGET_DIMS.vocab_size - 1, count).tolist()


@pytest.mark.parametrize("prompt", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 30])
def test_rounds(slot: Slot, rng: np.random.Generator, prompt: int) -> None:
    """The first context is the prompt, in one pass of the drafter or in several; then rounds of uneven length, also
    two without a draft between them."""
    for start in range(0, prompt, CHUNK):
        slot.prefill(some_tokens(rng, min(CHUNK, prompt - start)))
    slot.draft()
    for nodes in ((0,), (11,), (1, 6)):
        slot.commit(rng, *nodes)
        slot.draft(bonus=int(rng.integers(50)))


def test_a_truncated_slot(slot: Slot, rng: np.random.Generator) -> None:
    """Cut inside what the drafter's cache holds, then inside what it was told and has not taken in."""
    slot.prefill(some_tokens(rng, 20))
    slot.draft()
    slot.truncate(12)
    slot.prefill(some_tokens(rng, 9))
    slot.truncate(14)
    slot.draft()
    slot.commit(rng, 11)
    slot.draft()


def test_two_drafts_without_new_states(slot: Slot, rng: np.random.Generator) -> None:
    slot.prefill(some_tokens(rng, 4))
    slot.draft()
    if isinstance(slot.engine, OrtEngine):  # whose graph takes in states whenever it drafts
        with pytest.raises(EngineError, match="no new target states"):
            slot.draft()
    else:
        slot.draft(bonus=8)
    slot.commit(rng, 3)
    slot.draft()


def test_slots_are_independent(slots: list[Slot], rng: np.random.Generator) -> None:
    for slot, length in zip(slots, (3, 31), strict=True):
        slot.truncate(0)
        slot.prefill(some_tokens(rng, length))
    for nodes in ((0, 11), (7, 2)):
        for slot, node in zip(slots, nodes, strict=True):
            slot.draft()
            slot.commit(rng, node)
