"""Drafters with a head for pairs on the TensorRT engine, over fake device memory, beside the ONNX Runtime engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_target, make_variant, reading_variant
from dflash_truth import refuse_to_draw
from fake_trt_engine import FORMS, Lowerings, generate, installed
from numerics import path_to, random_tree

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.runtime.candidates import Bilinear
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM

LIMITS = Limits(max_seq_len=120, max_batch=3, max_tree_budget=40, prefill_chunk=32)
PROMPTS = ["t3 t6", " ".join(f"t{i}" for i in range(2, 45)), "t7 t9 t11"]
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {
        "markov_rank": 5,
        "markov_gated": True,
        "anchor_first": True,
        "own_embedding": True,
        "own_head": True,
        "draft_vocab_size": 70,
        "block_size": 7,
    },
    "dflash2": {"selector": Selector(top=8, rank=6), "convolution": Convolution(taps=2, groups=8), "block_size": 6},
}


@pytest.fixture(scope="module", params=["plugin", "native"])
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(
    request: pytest.FixtureRequest, form: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """The same target and drafter (on TensorRT, on ONNX Runtime)."""
    folder = tmp_path_factory.mktemp("heads")
    target, drafter = make_target(folder / "target"), folder / "drafter"
    dims = make_variant(drafter, **DRAFTERS[request.param])
    limits: dict[str, Any] = {n: getattr(LIMITS, n) for n in ("max_seq_len", "max_batch", "max_tree_budget")}
    with reading_variant(drafter, dims):
        compile_engine(BuildRequest(target="x", checkpoint=target, drafter=drafter, output=folder / "ort", **limits))
        lowerings = Lowerings(folder, target, drafter, folder / "ort", LIMITS, "fp32", FORMS[form])
    with installed(lowerings.machine()) as machine, LLM(folder / "ort", threads=1) as reference:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            assert isinstance(llm.engine, TrtEngine) and llm.engine.manifest.drafting.dims == dims
            yield llm, reference
        assert not machine.cuda.leaks


def test_greedy_output_is_that_of_ar(pair: tuple[LLM, LLM]) -> None:
    """Slots of different lengths; more prompts than slots."""
    plain, drafted = (generate(pair[0], PROMPTS * 2, method=method) for method in ("ar", "ddtree"))
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]


def test_rounds_are_those_of_the_onnxruntime_engine(pair: tuple[LLM, LLM]) -> None:
    """Drawn from a flat distribution: a random drafter never names the most probable token."""
    options: dict[str, Any] = {"method": "ddtree", "tree_budget": 40, "temperature": 9.0, "seed": 3}
    found, expected = (generate(llm, PROMPTS * 2, **options) for llm in pair)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.metrics.acceptance_lengths for o in found] == [o.metrics.acceptance_lengths for o in expected]
    assert max(length for o in found for length in o.metrics.acceptance_lengths) > 1, "a draft was accepted"


def test_drafts_are_those_of_the_onnxruntime_engine(pair: tuple[LLM, LLM]) -> None:
    """Passes over one slot and over all, with equally many new states and not."""
    engines = [llm.engine for llm in pair]
    rng, vocab = np.random.default_rng(5), TARGET_DIMS.vocab_size
    for slot, size in enumerate((1, 20, 5)):
        prompt = rng.integers(5, vocab, size)
        for engine in engines:
            engine.truncate(slot, 0)
            engine.prefill(slot, prompt, rows="none", taps=True)
    for slots in ((0, 1, 2), (1,), (0, 2), (2, 0, 1)):
        requests = [DraftRequest(slot, 7 + slot, 5, 4, refuse_to_draw) for slot in slots]
        for ours, theirs in zip(*(engine.draft(requests) for engine in engines), strict=True):
            assert_same(ours.candidates, theirs.candidates)
        for slot in (0, 1, 2):
            tree = random_tree(rng, 12, vocab)
            path = path_to(tree, int(rng.integers(len(tree))))
            for engine in engines:
                engine.verify([VerifyRequest(slot, tree)])
                engine.commit(slot, path, taps=True)


def assert_same(found: object, expected: object) -> None:
    assert isinstance(found, Bilinear) and isinstance(expected, Bilinear)
    for name, values in asdict(expected).items():
        np.testing.assert_allclose(getattr(found, name), values, atol=2e-3, err_msg=name)
