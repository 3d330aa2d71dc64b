"""Every candidate of EAGLE-3 drafts against PyTorch, over several rounds, on the backends that run the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, drafter_weights, make_eagle, make_target
from eagle_truth import Eagle3
from numerics import Measured, Truth, assert_close

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.kind import EXPANDED
from ddtree_trt.models.families import QWEN2
from ddtree_trt.runtime.candidates import LinkedRows
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.tree import TokenTree

K, LEVELS, LAYERS = 5, 4, 8
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed-residual": {"norm_before_residual": True},
    "normed-output": {"norm_output": True, "tap_layers": (0, 7)},
    "own-width": {"own_embedding": True, "target_hidden_size": 32, "hidden_size": 48, "num_heads": 2},
    "qwen2-whole-vocabulary": {"family": QWEN2, "draft_vocab_size": None, "tap_layers": (0, 2, 3, 5, 6)},
    "head-of-the-target": {"own_head": False, "draft_vocab_size": None},
    "only-its-embedding": {"own_head": False, "draft_vocab_size": None, "own_embedding": True},
}


def never(*_: object) -> DrawnFrom:
    raise AssertionError("a tree's drafter draws nothing")


class Slot:
    """A slot of an engine beside the truth: drafts are compared row by row."""

    def __init__(self, engine: Measured, slot: int, target: Truth, drafter: Eagle3) -> None:
        self.engine, self.slot, self.target, self.drafter = engine, slot, target, drafter
        self.tokens: list[int] = []

    def prefill(self, tokens: list[int]) -> None:
        self.engine.prefill(self.slot, np.array(tokens), rows="last", taps=True)
        self.tokens += tokens

    def draft(self, bonus: int) -> None:
        request = DraftRequest(self.slot, bonus, K, LEVELS, never)
        (draft,) = self.engine.draft([request])
        rows, taps = draft.candidates, self.target(self.tokens)[1]
        assert isinstance(rows, LinkedRows)
        pending: list[tuple[int, list[int]]] = [(0, [])]
        for row, drafted in pending:
            expected = self.drafter(taps, [*self.tokens, bonus], drafted)
            what = f"row behind {len(self.tokens)} tokens and {drafted}"
            assert_close(rows.log_probs[row], -np.sort(-expected)[:K], what)
            by_token = dict(zip(self.drafter.target_ids.tolist(), expected, strict=True))
            found = np.array([by_token[t] for t in rows.token_ids[row].tolist()], np.float32)
            assert_close(rows.log_probs[row], found, f"{what}, by token")
            links = zip(rows.next_rows[row].tolist(), rows.token_ids[row].tolist(), strict=True)
            pending += [(next_row, [*drafted, token]) for next_row, token in links if next_row >= 0]
        assert len(pending) == len(rows.log_probs) == 1 + K + EXPANDED * (LEVELS - 2)

    def commit(self, root: int, path: list[int], rng: np.random.Generator) -> None:
        """Verify a branching tree below `root` and keep a path of it."""
        tokens = np.array([root, *rng.integers(0, 96, 5)])
        tree = TokenTree(tokens, np.array([-1, 0, 0, 1, 2, 4], np.int32), np.array([0, 1, 1, 2, 2, 3], np.int32))
        self.engine.verify([VerifyRequest(self.slot, tree)])
        self.engine.commit(self.slot, np.array(path, np.int32), taps=True)
        self.tokens += tokens[path].tolist()


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds(tmp_path: Path, shape: str, backend: Any) -> None:
    """Of two slots in turn: a prompt in several passes, then rounds of uneven length and one without a draft."""
    tied = shape != "head-of-the-target"
    target = make_target(tmp_path / "target", num_layers=LAYERS, tied=tied)
    drafter = make_eagle(tmp_path / "drafter", **SHAPES[shape])
    request = BuildRequest("pair", target, drafter, output=tmp_path / "engine", backend=backend, precision="fp32")
    dims = compile_engine(request).drafting.dims
    assert dims.own_head == SHAPES[shape].get("own_head", True)
    tables = target_tables(target)
    rng = np.random.default_rng(3)
    engine: Any = open_engine(tmp_path / "engine", warm=False)
    try:
        truth = Truth(target, dims.tap_layers), Eagle3(dims, drafter_weights(dims, 1), *tables)
        slots = [Slot(engine, n, *truth) for n in range(engine.manifest.limits.max_batch)][:2]
        for slot, size in zip(slots, (11, 1), strict=False):
            slot.prefill(rng.integers(0, 96, size).tolist())
        for bonus, path in ((5, [0, 2, 4, 5]), (9, [0]), (30, [0, 1])):
            for slot in slots:
                slot.draft(bonus)
                slot.commit(bonus, path, rng)
        for slot in slots:
            slot.commit(7, [0, 1, 3], rng)
            slot.draft(8)
        slots[0].engine.truncate(0, 9)
        del slots[0].tokens[9:]
        assert engine.draftable_length(0) == 9
    finally:
        engine.close()


def target_tables(target: Path) -> tuple[Any, Any]:
    """The target's embedding and head, one and the same where they are tied."""
    from safetensors.numpy import load_file

    tensors = load_file(target / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    return embedding, tensors.get("lm_head.weight", embedding)


def test_a_long_prompt_takes_several_passes(tmp_path: Path) -> None:
    """Longer than a chunk; a drafted row then sees all of it."""
    target = make_target(tmp_path / "target", num_layers=LAYERS, max_positions=2048)
    drafter = make_eagle(tmp_path / "drafter", max_positions=2048)
    request = BuildRequest("pair", target, drafter, output=tmp_path / "engine", backend="onnxruntime")
    manifest = compile_engine(request)
    dims, chunk = manifest.drafting.dims, manifest.limits.prefill_chunk
    rng = np.random.default_rng(4)
    engine: Any = open_engine(tmp_path / "engine", warm=False)
    try:
        truth = Truth(target, dims.tap_layers), Eagle3(dims, drafter_weights(dims, 1), *target_tables(target))
        slot = Slot(engine, 0, *truth)
        for size in (chunk, chunk, 30):
            slot.prefill(rng.integers(0, TARGET_DIMS.vocab_size, size).tolist())
        slot.draft(3)
    finally:
        engine.close()
