"""DFlash drafters with windows, causal layers, a predicting anchor and tables of their own, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SCALINGS, TARGET_DIMS, make_target, make_variant, reading_variant
from dflash_truth import DFlash, refuse_to_draw
from drafts import marginals
from engine_builds import build_engine, build_torch_engine
from numerics import Measured, Truth, assert_close, path_to, random_tree

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

CHUNK = Limits.prefill_chunk
TOP_K = 20
WINDOW = 12
BUILDS: dict[str, Callable[..., Measured]] = {
    "onnxruntime": build_engine,
    "torch": build_torch_engine,
}
OWN = {"own_embedding": True, "own_head": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "windows": {"windows": (WINDOW, WINDOW)},
    "a window below the block": {"windows": (3, 0), "block_size": 8},
    "causal": {"causal": (True, True)},
    "causal windows": {"causal": (True, True), "windows": (WINDOW, 3), "block_size": 8},
    "mixed": {
        "num_layers": 5,
        "windows": (WINDOW, 0, WINDOW, 5, 0),
        "causal": (True, True, False, True, False),
        "block_size": 7,
        "tap_layers": (0, 1, 2),
    },
    "eight layers": {"num_layers": 8, "windows": (*(WINDOW,) * 7, 0), "causal": (*(True,) * 7, False)},
    "a block of 32": {"block_size": 32, "windows": (WINDOW, 0)},
    "anchor first": {"anchor_first": True, "block_size": 7},
    "own tables": OWN,
    "own embedding": {"own_embedding": True},
    "draft ids": {"own_head": True, "draft_vocab_size": 40, "anchor_first": True},
    "few draft ids": {**OWN, "draft_vocab_size": TOP_K, "windows": (WINDOW, 0), "causal": (True, False)},
    "yarn": {"rope_scaling": SCALINGS["yarn"], "windows": (WINDOW, WINDOW)},
}


class Pair:
    """One slot of an engine and the truth about the drafts behind its tokens."""

    def __init__(self, path: Path, build: Callable[..., Measured], fields: dict[str, Any]) -> None:
        target = make_target(path / "target", max_positions=4 * CHUNK)
        dims = make_variant(path / "drafter", max_positions=4 * CHUNK, **fields)
        with reading_variant(path / "drafter", dims):
            self.engine = build(target, path / "drafter", path / "engine", max_batch=1)
        assert self.engine.manifest.drafting.dims == dims
        self.truth = Truth(target, dims.tap_layers)
        self.dflash = DFlash(path / "drafter", dims, self.truth)
        self.tokens: list[int] = []
        self.rng = np.random.default_rng(3)

    @property
    def dims(self) -> DFlashDims:
        return self.dflash.dims

    def start(self, length: int) -> None:
        """Empty the slot and put that many tokens into it."""
        self.engine.truncate(0, 0)
        self.tokens = self.rng.integers(0, TARGET_DIMS.vocab_size - 1, length).tolist()
        for start in range(0, length, CHUNK):
            self.engine.prefill(0, np.array(self.tokens[start : start + CHUNK]), rows="none", taps=True)

    def draft(self) -> None:
        bonus = int(self.rng.integers(50))
        (draft,) = self.engine.draft([DraftRequest(0, bonus, TOP_K, 1, refuse_to_draw)])
        drafted = marginals(draft)
        expected = self.dflash(self.truth(self.tokens)[1], bonus)
        assert drafted.log_probs.shape == (self.dims.draft_length, TOP_K)
        what = f"draft behind {len(self.tokens)}"
        assert_close(drafted.log_probs, -np.sort(-expected, axis=-1)[:, :TOP_K], what)
        assert_close(drafted.log_probs, np.take_along_axis(expected, drafted.token_ids, axis=-1), f"{what}, by token")

    def commit(self, nodes: int) -> None:
        """Commit a chain of that many nodes."""
        tree = random_tree(self.rng, 12, TARGET_DIMS.vocab_size)
        path = path_to(tree, int(np.argmax(tree.depths >= min(nodes - 1, tree.depths.max()))))
        self.engine.verify([VerifyRequest(0, tree)])
        self.engine.commit(0, path, taps=True)
        self.tokens += tree.token_ids[path].tolist()


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Callable[..., Measured]:
    return BUILDS[request.param]


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, build: Callable[..., Measured], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    return Pair(tmp_path_factory.mktemp("variant"), build, VARIANTS[request.param])


@pytest.mark.parametrize("prompt", [1, WINDOW - 1, WINDOW, WINDOW + 1, CHUNK + 3])
def test_rounds(pair: Pair, prompt: int) -> None:
    """Context that ends before, at and behind the window's edge, then rounds of uneven length whose blocks cross it."""
    pair.start(prompt)
    pair.draft()
    for nodes in (1, 3, 2, 5):
        pair.commit(nodes)
        pair.draft()


def test_a_key_at_the_windows_edge_counts(tmp_path: Path) -> None:
    """Of a context of C rows the block's first row, at C, sees the last W − 1: a change of the state before them
    changes nothing, a change of the first of them does."""
    pair = Pair(tmp_path, build_torch_engine, {"windows": (WINDOW,), "num_layers": 1, "anchor_first": True})
    pair.start(3 * WINDOW)
    states = pair.truth(pair.tokens)[1]
    plain = pair.dflash(states, 3)
    for back, seen in ((WINDOW - 1, True), (WINDOW, False)):
        changed = states.copy()
        changed[len(states) - back] *= -1
        assert np.array_equal(pair.dflash(changed, 3)[0], plain[0]) is not seen
    pair.draft()


@pytest.mark.parametrize("name", ["anchor first", "mixed", "few draft ids"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_device_rounds_are_the_hosts(name: str, temperature: float, tmp_path: Path) -> None:
    """Tokens and acceptance of every round, and the tokens of `ar`."""
    Pair(tmp_path, build_torch_engine, VARIANTS[name]).engine.close()
    prompts = [f"t{i} t{2 * i}" for i in (3, 11)]
    settings: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    found = {}
    for mode in ("off", "on"):
        with LLM(tmp_path / "engine", threads=1, device_rounds=mode) as llm:
            params = SamplingParams(method="ddtree", tree_budget=16, **settings)
            found[mode] = llm.generate(prompts, params)
            if mode == "off":
                plain = llm.generate(prompts, SamplingParams(method="ar", **settings))
    for ar, host, device in zip(plain, found["off"], found["on"], strict=True):
        assert device.metrics.on_device and not host.metrics.on_device
        assert ar.outputs[0].token_ids == host.outputs[0].token_ids == device.outputs[0].token_ids
        assert host.metrics.acceptance_lengths == device.metrics.acceptance_lengths


def test_in_8_bits_too(tmp_path: Path) -> None:
    """The head of its own is rotated as the target's is, ids are mapped, and the windows hold: to 8 bits' rounding."""
    pair = Pair(tmp_path, partial(build_engine, precision="int8"), VARIANTS["few draft ids"])
    pair.start(3 * WINDOW)
    draft = marginals(pair.engine.draft([DraftRequest(0, 7, TOP_K, 1, refuse_to_draw)])[0])
    expected = np.take_along_axis(pair.dflash(pair.truth(pair.tokens)[1], 7), draft.token_ids, axis=-1)
    assert np.abs(draft.log_probs - expected).max() < 0.3 * expected.std()
