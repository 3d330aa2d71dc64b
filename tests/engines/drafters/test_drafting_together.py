"""Drafts of all slots in one call, beside those of one slot after another: bit for bit the same in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_eagle, make_target
from engine_builds import build_engine, build_torch_engine
from numerics import path_to, random_tree

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.runtime.candidates import LinkedRows
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

PROMPTS = (1, Limits.prefill_chunk + 44, 7, 31, 2)  # tokens of each slot's: one takes two passes
SLOTS = len(PROMPTS)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["eagle3", "autoregressive"])
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
