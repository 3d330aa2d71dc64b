"""Engines of a real TensorRT on a real GPU: `make test-trt`. Skipped, with the reason, everywhere else."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import marginals
from engine_builds import PACKAGED
from fake_trt_engine import BLOCK
from numerics import path_to, random_tree
from quantized import ALGORITHMS, quantize

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.build.backends.tensorrt.backend import LOWEST_FP8_SM, Machine
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.check.run import check_engine
from ddtree_trt.device.libraries import call, cuda_bindings
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = ["def fib(n):", "There are 13 muffins on Yaya's table. She sells 6 of them. How many are left?", "a"]


@pytest.fixture
def engine(built: Path) -> Iterator[TrtEngine]:
    engine = open_engine(built)
    assert isinstance(engine, TrtEngine)
    yield engine
    engine.close()


@pytest.fixture
def other(tiny_engine: Path) -> Iterator[OrtEngine]:
    engine = open_engine(tiny_engine, threads=1)
    assert isinstance(engine, OrtEngine)
    yield engine
    engine.close()


def assert_near(found: np.ndarray, expected: np.ndarray, precision: str) -> None:
    """As far apart as the precision rounds, for the largest value of each row."""
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(found - expected) <= PRECISIONS[precision].relative_rounding * largest).all()


def test_it_says_what_the_onnxruntime_engine_says(engine: TrtEngine, other: OrtEngine) -> None:
    """Branching trees of slots of different lengths in one pass, padded; paths that move rows; rounds after them."""
    rng, precision = np.random.default_rng(2), engine.manifest.precision
    for slot, size in enumerate((1, 40, 300)):
        ids = rng.integers(5, 2048, size)
        for start in range(0, size, 256):
            said = [e.prefill(slot, ids[start : start + 256], rows="all", taps=True) for e in (engine, other)]
            assert_near(np.asarray(said[0].logits), np.asarray(said[1].logits), precision)
    for sizes in ((1, 33, 200), (60, 2, 5), (7, 7, 7)):
        requests = [DraftRequest(slot, 9, 8, 7) for slot in range(3)]
        for found, expected in zip(engine.draft(requests), other.draft(requests), strict=True):
            assert np.abs(marginals(found).log_probs - marginals(expected).log_probs).max() < 1
        trees = [random_tree(rng, size, 2048) for size in sizes]
        asked = [VerifyRequest(slot, tree) for slot, tree in enumerate(trees)]
        for ours, theirs in zip(engine.verify(asked), other.verify(asked), strict=True):
            assert_near(np.asarray(ours.logits), np.asarray(theirs.logits), precision)
            np.testing.assert_array_equal(ours.choices, np.asarray(ours.logits).argmax(-1))
        for slot, tree in enumerate(trees):
            for e in (engine, other):
                e.commit(slot, path_to(tree, len(tree) - 1)[:BLOCK], taps=True)


def test_it_is_lossless_and_its_drafter_is_wired_right(built: Path) -> None:
    report = check_engine(CheckSettings(str(built), limit=6))
    assert all(finding.passed for finding in report.greedy)
    assert any(finding.tau > 3 for finding in report.greedy)


def test_plans_load_again_and_two_waits_make_a_round(built: Path) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True, method="ddtree", tree_budget=32)
    texts = []
    for _ in range(2):
        with LLM(built) as llm:
            texts.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            engine = llm.engine
            assert isinstance(engine, TrtEngine)
            before = engine.device.waits
            (output,) = llm.generate(["fizz buzz, said the fox"], params)
            assert engine.device.waits - before <= 2 * output.metrics.rounds + 3  # and the prompt's
    assert texts[0] == texts[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_quantised_targets(algorithm: str, machine: Machine, tmp_path: Path) -> None:
    """Lossless against themselves, with drafts that are accepted, and smaller than the bf16 plan."""
    if algorithm == "FP8" and machine.gpu.sm < LOWEST_FP8_SM:
        pytest.skip(f"skipped: compute capability {machine.gpu.sm / 10} has no FP8")
    shutil.copytree(PACKAGED, tmp_path / "pair")  # the tokenizer lies beside
    target = quantize(tmp_path / "pair" / "target", algorithm, group_size=64)
    for name, checkpoint in (("plain", PACKAGED / "target"), ("quantised", target)):
        drafter, output = PACKAGED / "drafter", tmp_path / name
        compile_engine(
            BuildRequest(target="x", backend="tensorrt", checkpoint=checkpoint, drafter=drafter, output=output)
        )
    report = check_engine(CheckSettings(str(tmp_path / "quantised"), limit=4))
    assert all(finding.passed for finding in report.greedy)
    assert any(finding.tau > 2 for finding in report.greedy)
    if algorithm != "W8A16":  # TensorRT may widen it
        plain, smaller = ((tmp_path / name / artifact.TARGET_PLAN).stat().st_size for name in ("plain", "quantised"))
        assert smaller < plain


def test_an_autoregressive_drafter(machine: Machine, tmp_path: Path) -> None:
    """The target drafts for itself: what it drafts greedily is right but for rounding."""
    target = PACKAGED / "target"
    compile_engine(
        BuildRequest(target="x", backend="tensorrt", checkpoint=target, drafter=target, output=tmp_path / "e")
    )
    with LLM(tmp_path / "e") as llm:
        options: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
        drafted, plain = (llm.generate(PROMPTS, SamplingParams(method=m, **options)) for m in ("draft-model", "ar"))
    assert sum(d.outputs[0].token_ids == p.outputs[0].token_ids for d, p in zip(drafted, plain, strict=True)) >= 2
    assert sum(output.metrics.mean_acceptance_length for output in drafted) > 3 * len(PROMPTS)


def test_memory_is_given_back(built: Path) -> None:
    cuda = cuda_bindings()
    open_engine(built).close()  # libraries keep what they load first
    free, _ = call(cuda, "cudaMemGetInfo")
    for _ in range(3):
        engine = open_engine(built)
        engine.prefill(0, np.arange(5, 40), rows="last", taps=True)
        engine.close()
    assert free - call(cuda, "cudaMemGetInfo")[0] < 16 << 20
