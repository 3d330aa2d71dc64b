"""Engines whose rows do not depend on how many others are in a pass: single tokens beside chains, bit for bit."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engine_builds import CHATS
from numerics import follow_paths, random_tree

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.tree import token_chain
from workbench.equal_bits import compare


@pytest.fixture(scope="module", params=["fp32", "int8"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / request.param
    compile_engine(BuildRequest(target="tiny", output=path, precision=request.param, max_seq_len=320))
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[OrtEngine]:
    engine = OrtEngine(directory, load_manifest(directory), EngineOptions(threads=1))
    yield engine
    engine.close()


def tokens_of(engine: OrtEngine, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, engine.manifest.target_dims.vocab_size, count)


def test_a_cache_is_used_to_its_last_row(engine: OrtEngine) -> None:
    rows, chunk = engine.manifest.limits.cache_rows, engine.manifest.limits.prefill_chunk
    tokens = tokens_of(engine, rows, 3)
    engine.truncate(0, 0)
    for i in range(0, rows - 2, chunk):
        engine.prefill(0, tokens[i : min(i + chunk, rows - 2)], rows="last", taps=False)
    for length in (rows - 1, rows):
        (verdict,) = engine.verify([VerifyRequest(0, token_chain(tokens[length - 1 : length]))])
        assert np.isfinite(np.array(verdict.logits)).all()
        engine.commit(0, np.zeros(1, np.int32), taps=False)
        assert engine.length(0) == length
    with pytest.raises(EngineError, match="1 more do not fit"):
        engine.verify([VerifyRequest(0, token_chain(tokens[:1]))])


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 43))])
def test_rows_beside_others_have_the_bits_of_single_tokens(directory: Path, seed: int) -> None:
    """Rounds of 1 to 8 slots with trees of 2 to 129 nodes behind prompts in chunks, on 1 to 4 threads: the deepest path
    of each tree, which is committed, is compared with its tokens one by one on one thread."""
    rng, manifest = np.random.default_rng(seed), load_manifest(directory)
    engine, alone = (OrtEngine(directory, manifest, EngineOptions(threads=t)) for t in (1 + seed % 4, 1))
    slots = rng.permutation(8)[: rng.integers(1, 9)].tolist()
    for slot in slots:
        prompt = tokens_of(engine, int(rng.integers(1, 150)), int(rng.integers(1 << 30)))
        alone.prefill(slot, prompt, rows="none", taps=False)
        for first, end in pairwise(sorted({0, len(prompt), *rng.integers(0, len(prompt), 3).tolist()})):
            engine.prefill(slot, prompt[first:end], rows="none", taps=False)
    for _ in range(2):
        trees = {s: random_tree(rng, int(rng.integers(2, 130)), manifest.target_dims.vocab_size) for s in slots}
        follow_paths(engine, alone, trees, np.testing.assert_array_equal)
    engine.close()
    alone.close()


def test_trees_give_the_bits_of_ar(directory: Path) -> None:
    """Random methods, budgets and batches."""
    with LLM(directory, threads=1) as llm:
        *_, sums = compare(llm, CHATS[::9], 600, length=60)
    assert sums.tokens >= 600 and sums.tokens > 2 * sums.rounds
    assert (sums.other_tokens, sums.other_rows) == (0, 0)
