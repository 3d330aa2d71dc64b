"""The TensorRT engine without TensorRT or a GPU: what it says, over fake device memory, on the graphs it would run.

See `fake_cuda` and `fake_trt_engine`. Nothing here says anything of TensorRT's own numbers or of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_pair
from drafts import marginals
from engine_builds import build_engine
from fake_trt_engine import (
    BLOCK,
    FORMS,
    PLUGIN,
    PROMPTS,
    RTX,
    Form,
    Lowerings,
    Machine,
    generate,
    installed,
)
from numerics import path_to, random_tree

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.device import buffers
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.tree import TokenTree


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


# Losslessness


METHODS: list[dict[str, Any]] = [
    {"method": "ar"},
    {"method": "dflash"},
    {"method": "ddtree", "tree_budget": 40},
    {"method": "ddtree", "tree_budget": "auto"},
]


@pytest.fixture(scope="module")
def reference(small_engine: Path) -> Iterator[LLM]:
    with LLM(small_engine, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("options", METHODS, ids=lambda o: "-".join(map(str, o.values())))
def test_output_is_that_of_the_onnxruntime_engine(running: Any, reference: LLM, options: dict[str, Any]) -> None:
    """Slots of different lengths share every pass; the same drafts are accepted, for the same numbers come out."""
    llm, _ = running
    prompts = [*PROMPTS, PROMPTS[0]]  # one more than there are slots
    found, expected = generate(llm, prompts, **options), generate(reference, prompts, method="ar")
    assert tokens(found) == tokens(expected)
    if options.get("tree_budget") != "auto":
        expected = generate(reference, prompts, **options)
        assert [o.metrics.acceptance_lengths for o in found] == [o.metrics.acceptance_lengths for o in expected]


@pytest.mark.parametrize("method", ["ar", "ddtree"])
def test_draws_are_those_of_the_onnxruntime_engine(running: Any, reference: LLM, method: str) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": 2, "method": method}
    options |= {"tree_budget": 16} if method == "ddtree" else {}
    found, expected = (generate(llm, PROMPTS, **options) for llm in (running[0], reference))
    assert tokens(found) == tokens(expected)
    ours, theirs = ([entry.logprob for entry in o[0].outputs[0].logprobs or ()] for o in (found, expected))
    assert ours
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("form", [PLUGIN, RTX], ids=["plugin", "TensorRT for RTX"])
def test_half_precision(small_engine: Path, tmp_path: Path, form: Form) -> None:
    """Two bytes an element, as on a GPU: the same loop, lossless against itself."""
    lowerings = Lowerings.packaged(tmp_path, small_engine, form, "fp16")
    with installed(lowerings.machine()) as machine:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            plain = generate(llm, PROMPTS, method="ar")
            tree = generate(llm, PROMPTS, method="ddtree", tree_budget=16)
        assert tokens(tree) == tokens(plain)
        assert sum(o.metrics.mean_acceptance_length for o in tree) > 1.4 * len(tree)
        assert not machine.cuda.leaks


def test_a_profile_is_measured_where_there_is_none(machine: Machine) -> None:
    with LLM(machine.directory) as llm:
        assert (machine.directory / artifact.PROFILE).is_file()
        assert llm.engine.length(0) == 0


# Beside the ONNX Runtime engine, call by call


class Both:
    """The same done to both engines; what they say is compared."""

    def __init__(self, engine: TrtEngine, other: OrtEngine) -> None:
        self.engine, self.other = engine, other
        self.rng = np.random.default_rng(5)
        self.vocab = engine.manifest.target_dims.vocab_size
        self.commits: list[int] = []

    def prefill(self, slot: int, size: int, chunk: int) -> None:
        ids = self.rng.integers(5, self.vocab, size)
        for start in range(0, size, chunk):
            piece = ids[start : start + chunk]
            said, expected = (e.prefill(slot, piece, rows="all", taps=True) for e in (self.engine, self.other))
            np.testing.assert_allclose(np.asarray(said.logits), expected.logits, atol=2e-3)

    def draft(self, *slots: int) -> None:
        requests = [DraftRequest(slot, 7 + slot, 5, 4) for slot in slots]
        for found, expected in zip(self.engine.draft(requests), self.other.draft(requests), strict=True):
            assert marginals(found).log_probs.shape == marginals(expected).log_probs.shape
            np.testing.assert_allclose(marginals(found).log_probs, marginals(expected).log_probs, atol=2e-3)

    def round(self, sizes: dict[int, int], *, deep: bool = False) -> None:
        """Verify trees of these sizes and commit a path of each. `deep`: every other node goes on from the one before,
        and the path is the longest, a block at most."""
        make = deep_tree if deep else random_tree
        trees = {slot: make(self.rng, size, self.vocab) for slot, size in sizes.items()}
        said = self.engine.verify([VerifyRequest(slot, tree) for slot, tree in trees.items()])
        for (slot, tree), found in zip(trees.items(), said, strict=True):
            (wanted,) = self.other.verify([VerifyRequest(slot, tree)])
            np.testing.assert_allclose(np.asarray(found.logits), wanted.logits, atol=2e-3)
            assert found.choices.dtype == np.int64
            end = int(tree.depths.argmax()) if deep else int(self.rng.integers(len(tree)))
            path = path_to(tree, end)[:BLOCK]
            self.commits.append(len(path))
            for engine in (self.engine, self.other):
                engine.commit(slot, path, taps=True)

    def truncate(self, slot: int, length: int) -> None:
        for engine in (self.engine, self.other):
            engine.truncate(slot, length)


def deep_tree(rng: np.random.Generator, nodes: int, vocab_size: int) -> TokenTree:
    """A chain of the even nodes with a leaf beside each: rows move when its path is committed."""
    parents = np.array([-1, *(i - 1 - (i + 1) % 2 for i in range(1, nodes))], np.int32)
    depths = (np.arange(nodes, dtype=np.int32) + 1) // 2
    return TokenTree(rng.integers(0, vocab_size, nodes), parents, depths)


def assert_follows(both: Both) -> None:
    """Prompts of one token and of several chunks, branching trees of other sizes in one pass, cut sequences."""
    both.prefill(0, 1, 32)
    both.prefill(1, 80, 32)
    both.prefill(2, 5, 2)
    for sizes in ({0: 1, 1: 40, 2: 7}, {0: 9, 2: 33}, {0: 12, 1: 2, 2: 1}):
        both.draft(*sizes)
        both.round(sizes)
    both.truncate(1, 50)  # behind the states that are still there
    both.prefill(1, 3, 32)
    both.truncate(0, both.engine.length(0) - 1)  # within them
    both.round({0: 3, 1: 5, 2: 4})
    both.draft(0, 1, 2)
    for sizes in ({0: 24, 1: 40, 2: 5}, {1: 32, 2: 19}):  # commits of up to a block
        both.round(sizes, deep=True)
        both.draft(*sizes)
    assert max(both.commits) == BLOCK and any(8 < length < BLOCK for length in both.commits)
    both.truncate(0, 0)
    both.prefill(0, 20, 8)
    both.draft(0)
    for _ in range(20):  # rounds without drafts: states wait, and are taken in by themselves
        both.round({0: 2, 1: 1, 2: 4})
    both.draft(0, 1, 2)


def test_it_says_what_the_onnxruntime_engine_says(machine: Machine, small_engine: Path) -> None:
    both = Both(TrtEngine.open(machine.directory, load_manifest(machine.directory)), _ort(small_engine))
    assert_follows(both)
    both.engine.close()
    assert not machine.cuda.leaks


def _ort(directory: Path) -> OrtEngine:
    engine = open_engine(directory, threads=1)
    assert isinstance(engine, OrtEngine)
    return engine


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_planes_that_are_no_multiple_of_256_bytes(tmp_path: Path, form: Form) -> None:
    """An untied pair whose slots are odd: TensorRT takes no such address, so something lies behind each plane, or with
    native attention behind each slot."""
    limits = Limits(max_seq_len=120, max_batch=3, max_tree_budget=40, prefill_chunk=32)
    target, drafter = make_pair(tmp_path / "pair", tied=False, num_kv_heads=1, num_heads=2)
    like = tmp_path / "like"
    other = build_engine(target, drafter, like, max_seq_len=120, max_batch=3, max_tree_budget=40)
    lowerings = Lowerings(tmp_path, target, drafter, like, limits, "fp32", form)
    with installed(lowerings.machine()) as machine:
        manifest = load_manifest(machine.directory)
        shape = buffers.CacheShape.of(manifest.target_dims, limits, 4)
        assert shape.slots * shape.slot_bytes % 256
        rows = buffers.CacheShape.of(manifest.target_dims, manifest.limits, 4).rows
        assert (rows > limits.cache_rows) == form.native
        engine = open_engine(machine.directory)
        both = Both(engine, other)  # type: ignore[arg-type]
        both.prefill(0, 1, 32)
        both.prefill(1, 30, 32)
        both.prefill(2, 9, 4)
        for sizes in ({0: 3, 1: 40, 2: 7}, {0: 9, 1: 33, 2: 2}):
            both.draft(0, 1, 2)
            both.round(sizes)
        engine.close()
