"""Every candidate of EAGLE-3 drafts against PyTorch, over several rounds, on the backends that run the drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, drafter_weights, make_eagle, make_target
from eagle_truth import Eagle3
from engine_builds import build_engine, build_torch_engine
from numerics import Measured, Truth, assert_close, path_to, random_tree

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.drafters.kind import EXPANDED
from ddtree_trt.models.families import QWEN2
from ddtree_trt.runtime.candidates import LinkedRows
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import TokenTree

K, LEVELS, LAYERS = 5, 4, 8
Build = Callable[..., Measured]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed-residual": {"norm_before_residual": True},
    "normed-output": {"norm_output": True, "tap_layers": (0, 7)},
    "own-width": {"own_embedding": True, "target_hidden_size": 32, "hidden_size": 48, "num_heads": 2},
    "qwen2-whole-vocabulary": {"family": QWEN2, "draft_vocab_size": None, "tap_layers": (0, 2, 3, 5, 6)},
    "head-of-the-target": {"own_head": False, "draft_vocab_size": None},
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

    def check(self, bonus: int, draft: Draft) -> None:
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


def draft(slots: list[Slot], bonus: int) -> None:
    drafts = slots[0].engine.draft([DraftRequest(slot.slot, bonus, K, LEVELS, never) for slot in slots])
    for slot, found in zip(slots, drafts, strict=True):
        slot.check(bonus, found)


def slots_of(path: Path, build: Build, *, tied: bool = True, longest: int = 512, **shape: Any) -> list[Slot]:
    """Two slots of an engine of this shape, with positions for `longest` tokens."""
    target = make_target(path / "target", num_layers=LAYERS, tied=tied, max_positions=longest)
    drafter = make_eagle(path / "drafter", max_positions=longest, **shape)
    engine = build(target, drafter, path / "engine", max_batch=2)
    dims = engine.manifest.drafting.dims
    assert dims.own_head == shape.get("own_head", True)
    truth = Truth(target, dims.tap_layers)
    tables = truth.model.model.embed_tokens, truth.model.lm_head
    plain = Eagle3(dims, drafter_weights(dims, 1), *(table.weight.detach() for table in tables))
    return [Slot(engine, n, truth, plain) for n in range(2)]


@pytest.mark.parametrize("build", [build_engine, build_torch_engine])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds(tmp_path: Path, shape: str, build: Build) -> None:
    """Of two slots: prompts, then rounds of uneven length and one without a draft."""
    rng = np.random.default_rng(3)
    slots = slots_of(tmp_path, build, tied=shape != "head-of-the-target", **SHAPES[shape])
    for slot, size in zip(slots, (11, 1), strict=True):
        slot.prefill(rng.integers(0, 96, size).tolist())
    for bonus, *paths in ((5, [0, 2, 4, 5], [0, 1]), (9, [0], [0, 1, 3]), (30, [0, 1], [0, 2])):
        draft(slots, bonus)
        for slot, path in zip(slots, paths, strict=True):
            slot.commit(bonus, path, rng)
    for slot in slots:
        slot.commit(7, [0, 1, 3], rng)
    draft(slots, 8)
    slots[0].engine.truncate(0, 9)
    assert slots[0].engine.draftable(0, 99) == 9


def test_a_long_prompt_takes_several_passes(tmp_path: Path) -> None:
    """Longer than a chunk; a drafted row then sees all of it."""
    rng, chunk = np.random.default_rng(4), Limits.prefill_chunk
    slot, _ = slots_of(tmp_path, build_engine, longest=2048)
    for size in (chunk, chunk, 30):
        slot.prefill(rng.integers(0, TARGET_DIMS.vocab_size, size).tolist())
    draft([slot], 3)


# Drafts of all slots in one call, beside those of one slot after another: bit for bit the same in ONNX Runtime


PROMPTS = (1, Limits.prefill_chunk + 44, 7, 31, 2)  # tokens of each slot's: one takes two passes
SLOTS = len(PROMPTS)


@pytest.mark.parametrize(("kind", "precision"), [("eagle3", "int8"), ("autoregressive", "fp32")])
def test_drafts_together_are_those_alone(tmp_path: Path, kind: str, precision: str) -> None:
    """Of any of the slots, behind contexts of any length, with their own lengths, candidates and draws."""
    target = make_target(tmp_path / "target", num_layers=8, max_positions=512)
    if kind == "eagle3":
        drafter = make_eagle(tmp_path / "drafter", max_positions=512)
    else:
        drafter = make_target(tmp_path / "drafter", num_layers=1, tied=False, seed=3, max_positions=512)
    together = build_engine(target, drafter, tmp_path / "engine", max_batch=SLOTS, precision=precision)
    alone = OrtEngine(tmp_path / "engine", load_manifest(tmp_path / "engine"))
    rng = np.random.default_rng(1)
    for slot, size in enumerate(PROMPTS):
        prompt = rng.integers(0, TARGET_DIMS.vocab_size, size)
        for start in range(0, size, Limits.prefill_chunk):
            for engine in (together, alone):
                engine.prefill(slot, prompt[start : start + Limits.prefill_chunk], rows="none", taps=True)
    for count in (SLOTS, 3, 1, SLOTS):
        requests = []
        for slot in rng.permutation(SLOTS)[:count].tolist():
            bonus, top_k, length = (int(rng.integers(*bounds)) for bounds in ((0, 96), (1, 17), (1, 7)))
            params = SamplingParams(temperature=1.0, seed=slot)
            draw = Sampler(params, TARGET_DIMS.vocab_size, [bonus], frozenset()).draft
            requests.append(DraftRequest(slot, bonus, top_k, length, draw))
        for request, found in zip(requests, together.draft(requests), strict=True):
            (expected,) = alone.draft([request])
            for name, values in vars(expected.candidates).items():
                np.testing.assert_array_equal(getattr(found.candidates, name), values)
            assert vars(found.candidates)["log_probs"].shape[1] == min(request.top_k, 60 if kind == "eagle3" else 96)
            if isinstance(expected.candidates, LinkedRows) and request.top_k > 1 and request.length > 2:
                assert (expected.candidates.next_rows >= 0).sum(1).max() > 1, "a branching tree"
            tokens = [[drawn.token for drawn in draft.drawn or ()] for draft in (found, expected)]
            assert tokens[0] == tokens[1] and len(tokens[0]) == (0 if kind == "eagle3" else request.length)
            tree = random_tree(rng, 9, TARGET_DIMS.vocab_size)
            tree.token_ids[0] = request.bonus_token
            path = path_to(tree, int(rng.integers(9)))
            for engine in (together, alone):
                engine.verify([VerifyRequest(request.slot, tree)])
                engine.commit(request.slot, path, taps=True)


def test_padded_passes_of_a_drafter_that_is_its_target_are_always_right(tmp_path: Path) -> None:
    target, prompts = make_target(tmp_path / "target"), [[5, 9, 2, 40, 7], [3], [8, 1] * 40]
    build_torch_engine(target, make_target(tmp_path / "drafter", tokenizer=False), tmp_path / "engine").close()
    with LLM(tmp_path / "engine") as llm:
        params = SamplingParams(method="draft-model", tree_budget=4, max_tokens=1 + 5 * 8, ignore_eos=True)
        assert [o.metrics.acceptance_lengths for o in llm.generate(prompts, params)] == [[5] * 8] * 3
