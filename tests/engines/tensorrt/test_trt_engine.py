"""The TensorRT engine without TensorRT or a GPU: what it says, over fake device memory, on the graphs it would run.

See `fake_cuda` and `fake_trt_engine`. Nothing here says anything of TensorRT's own numbers or of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BY_SWITCHES, SCALINGS, make_pair
from drafts import marginals
from engine_builds import PACKAGED, build_engine
from fake_trt_engine import (
    BLOCK,
    FORMS,
    PLUGIN,
    PROMPTS,
    RTX,
    Form,
    Lowerings,
    Machine,
    build_trt_engine,
    generate,
    installed,
)
from numerics import TOLERANCE, assert_close, path_to, random_tree

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.device import buffers
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
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

# What the plugin's kernels take are heads of 64 or 128; what ONNX Runtime computes here takes others too.
PAIRS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "untied": {"tied": False, "head_dim": 64, "num_heads": 4, "num_kv_heads": 1},
    "one-layer": {"num_layers": 1, "head_dim": 128, "num_heads": 2, "num_kv_heads": 2, "rope_theta": 1e6},
    "wide": {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "rms_norm_eps": 1e-5, "hidden_size": 48},
    "rope-yarn": {"head_dim": 64, "rope_scaling": SCALINGS["yarn"]},
    # TensorRT takes no addresses of such slots: something lies behind each plane, or with native attention behind each.
    "odd-slots": {"tied": False, "num_kv_heads": 1, "num_heads": 2},
    **{name: {"head_dim": 64, "family": family} for name, family in BY_SWITCHES.items()},
}
# Half precision rounds at 2⁻¹¹ of each value, through every layer.
TOLERANCES: dict[PrecisionName, float] = {"fp32": TOLERANCE, "fp16": 1e-2}
CASES = [(name, "fp32") for name in PAIRS] + [(name, "fp16") for name in ("tiny", *BY_SWITCHES)]


class Both:
    """The same done to both engines; what they say is compared."""

    def __init__(self, engine: TrtEngine, other: OrtEngine, tolerance: float) -> None:
        self.engine, self.other, self.tolerance = engine, other, tolerance
        self.rng = np.random.default_rng(5)
        self.vocab = engine.manifest.target_dims.vocab_size
        self.block = engine.manifest.drafting.dims.block_size
        self.commits: list[int] = []

    def close(self, found: Any, expected: Any, what: str) -> None:
        assert_close(np.asarray(found), np.asarray(expected), what, self.tolerance)

    def prefill(self, slot: int, size: int, chunk: int = 32) -> None:
        ids = self.rng.integers(5, self.vocab, size)
        for start in range(0, size, chunk):
            piece = ids[start : start + chunk]
            said, expected = (e.prefill(slot, piece, rows="all", taps=True) for e in (self.engine, self.other))
            self.close(said.logits, expected.logits, f"prefill of {size} in slot {slot}")

    def draft(self, *slots: int) -> None:
        """In one pass, with equally many new states and not."""
        requests = [DraftRequest(slot, 7 + slot, self.vocab, 4) for slot in slots]
        k = min(self.engine.limits.max_tree_budget, self.vocab)
        for n, (said, all_) in enumerate(zip(self.engine.draft(requests), self.other.draft(requests), strict=True)):
            found, expected, what = marginals(said), marginals(all_), f"draft {n} of {slots}"
            assert found.log_probs.shape[-1] == k
            by_token = np.empty_like(expected.log_probs)
            np.put_along_axis(by_token, expected.token_ids, expected.log_probs, axis=-1)
            self.close(found.log_probs, expected.log_probs[:, :k], what)
            self.close(found.log_probs, np.take_along_axis(by_token, found.token_ids, axis=-1), f"{what}, by token")

    def round(self, sizes: dict[int, int], *, deep: bool = False) -> None:
        """Verify trees of these sizes and commit a path of each. `deep`: every other node goes on from the one before,
        and the path is the longest, a block at most."""
        make = deep_tree if deep else random_tree
        trees = {slot: make(self.rng, size, self.vocab) for slot, size in sizes.items()}
        said = self.engine.verify([VerifyRequest(slot, tree) for slot, tree in trees.items()])
        for (slot, tree), found in zip(trees.items(), said, strict=True):
            (wanted,) = self.other.verify([VerifyRequest(slot, tree)])
            logits = np.asarray(found.logits)
            self.close(logits, wanted.logits, f"tree of {len(tree)} in slot {slot}")
            np.testing.assert_array_equal(found.choices, logits.argmax(-1))
            assert found.choices.dtype == np.int64
            end = int(tree.depths.argmax()) if deep else int(self.rng.integers(len(tree)))
            path = path_to(tree, end)[: self.block]
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


@pytest.mark.parametrize(("name", "precision"), CASES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_says_what_the_onnxruntime_engine_says(form: Form, name: str, precision: Any, tmp_path: Path) -> None:
    """Prompts of one token and of several chunks, branching trees of other sizes in one pass, cut sequences."""
    target, drafter = PACKAGED / "target", PACKAGED / "drafter"
    if name != "tiny":
        target, drafter = make_pair(tmp_path / "pair", max_positions=512, **PAIRS[name])
    options: dict[str, Any] = {"form": form, "precision": precision, "prefill_chunk": 32}
    limits: dict[str, Any] = {"max_seq_len": 256, "max_batch": 3, "max_tree_budget": 40}
    engine = build_trt_engine(target, drafter, tmp_path / "e", **options, **limits)
    both = Both(engine, build_engine(target, drafter, tmp_path / "other", **limits), TOLERANCES[precision])
    if name == "odd-slots":
        given = replace(engine.limits, prefill_chunk=32)
        shape = buffers.CacheShape.of(engine.manifest.target_dims, given, 4)
        assert shape.slots * shape.slot_bytes % 256 and (engine.limits.cache_rows > given.cache_rows) == form.native
    prompt, kept, rounds = (80, 50, 20) if precision == "fp32" else (34, 20, 2)  # halves stay near for so long only
    both.prefill(0, 1)
    both.prefill(1, prompt)
    both.prefill(2, 5, chunk=2)
    for sizes in ({0: 1, 1: 40, 2: 7}, {0: 9, 2: 33}, {0: 12, 1: 2, 2: 1}):
        both.draft(*sizes)
        both.round(sizes)
    both.truncate(1, kept)  # behind the states that are still there
    both.prefill(1, 3)
    both.truncate(0, engine.length(0) - 1)  # within them
    both.round({0: 3, 1: 5, 2: 4})
    both.draft(0, 1, 2)
    for sizes in ({0: 24, 1: 40, 2: 5}, {1: 32, 2: 19}):  # commits of up to a block
        both.round(sizes, deep=True)
        both.draft(*sizes)
    assert max(both.commits) == both.block
    assert both.block < BLOCK or any(8 < length < BLOCK for length in both.commits)
    both.truncate(0, 0)
    both.prefill(0, 20, chunk=8)
    both.draft(0)
    for _ in range(rounds):  # without drafts: states wait, and are taken in by themselves
        both.round({0: 2, 1: 1, 2: 4})
    both.draft(2, 0, 1)
    engine.close()
    assert not engine.device.api.leaks


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_keep_what_float32_sums(form: Form, tied: bool, tmp_path: Path) -> None:
    """In half precision too: the head's products and sums are float32, though its inputs are rounded. Large logits of
    different tokens, a half's step apart or less, stay apart."""
    pair = make_pair(tmp_path / "pair", tied=tied, head_dim=64, num_heads=2, num_kv_heads=1)
    engine = build_trt_engine(*pair, tmp_path / "e", form=form, precision="fp16", max_batch=1)
    head = engine._loaded.addresses[buffers.HEAD], engine.layout.sizes[buffers.HEAD]
    table = engine.device.api.device.view(*head).view(np.float32).reshape(engine.manifest.target_dims.table)
    # Two tokens whose rows differ by the last bit of one value, and large logits, where halves have steps of 2⁻⁶.
    table *= 64
    table[-1] = table[7]
    table[-1, 0] = np.nextafter(table[7, 0].astype(np.float16), np.float16(np.inf))
    said = engine.prefill(0, np.arange(3, 12), rows="all", taps=True)
    logits = np.asarray(said.logits)
    rounded = logits.astype(np.float16).astype(np.float32)
    assert np.abs(logits).max() > 16
    assert (logits != rounded).mean() > 0.9, "logits that went through halves"
    assert (logits[:, 7] != logits[:, -1]).all()
    assert (rounded[:, 7] == rounded[:, -1]).any(), "these rows are not near enough to tell"
    np.testing.assert_array_equal(said.choices, logits.argmax(-1))
