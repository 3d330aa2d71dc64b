"""DFlash drafters of every shape and variant against a plain statement in PyTorch, over uneven rounds."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BY_SWITCHES, SCALINGS, TARGET_DIMS, make_drafter, make_target, make_variant, reading_variant
from dflash_truth import DFlash
from engine_builds import PACKAGED, build_engine, build_torch_engine
from fake_trt_engine import FORMS, build_trt_engine
from numerics import Measured, assert_close, path_to, random_tree, truths

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import Bilinear, Marginals

CHUNK, WINDOW, TOP_K = Limits.prefill_chunk, 12, 20
Build = Callable[..., Measured]
BUILDS: dict[str, Build] = {"onnxruntime": build_engine, "torch": build_torch_engine}
# The graphs of TensorRT engines, run by ONNX Runtime on pretended machines.
LOWERED: dict[str, Build] = {
    form: partial(build_trt_engine, form=FORMS[form], max_seq_len=320, max_tree_budget=40) for form in FORMS
}
# As their config.json states them. The layers may be another family's than the target's, which is Qwen3's.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "block-4": {"block_size": 4, "tap_layers": (1,), "num_layers": 1, "family": BY_SWITCHES["llama"]},
    "block-8": {
        "block_size": 8,
        "num_heads": 8,
        "num_kv_heads": 1,
        "intermediate_size": 40,
        "rope_scaling": SCALINGS["llama3"],
    },
    "block-16": {"block_size": 16, "tap_layers": (0, 1, 2), "num_layers": 3, "head_dim": 32, "rms_norm_eps": 1e-5},
    "biases": {"family": BY_SWITCHES["qwen2"], "rope_scaling": SCALINGS["linear"]},
}
OWN = {"own_embedding": True, "own_head": True}
# Features that only some dialects state.
VARIANTS: dict[str, dict[str, Any]] = {
    "windows": {"windows": (WINDOW, WINDOW), "rope_scaling": SCALINGS["yarn"]},
    "causal windows": {"causal": (True, True), "windows": (WINDOW, 3), "block_size": 8},
    "mixed": {
        "num_layers": 5,
        "windows": (WINDOW, 0, WINDOW, 5, 0),
        "causal": (True, True, False, True, False),
        "block_size": 7,
        "tap_layers": (0, 1, 2),
    },
    "a block of 32": {"block_size": 32, "windows": (WINDOW, 0)},
    "anchor first": {"anchor_first": True, "block_size": 7, "causal": (False, True)},
    "draft ids": {"own_head": True, "draft_vocab_size": 40, "anchor_first": True},
    "few draft ids": {**OWN, "draft_vocab_size": TOP_K, "windows": (WINDOW, 0), "causal": (True, False)},
}
# Heads whose children depend on their parent, and convolutions.
PAIRS: dict[str, dict[str, Any]] = {
    "markov-gated": {"markov_rank": 8, "markov_gated": True, "block_size": 7},
    # More taps than rows: the last of them reach no row of the block.
    "long-convolution": {"markov_rank": 3, "convolution": Convolution(taps=6, groups=32), "block_size": 4},
    "scaled": {
        "selector": Selector(top=16, rank=6),
        "convolution": Convolution(taps=3, groups=2),
        "block_size": 16,
        "embedding_scale": 0.5,
        "logit_scale": 0.7,
        "logit_cap": 5.0,
        "num_layers": 3,
    },
    "dspark": {"markov_rank": 5, "block_size": 7, "anchor_first": True, **OWN},
    "pairs of draft ids": {"markov_rank": 5, "anchor_first": True, "own_head": True, "draft_vocab_size": 70},
    "dflash2": {
        "selector": Selector(top=16, rank=6),
        "convolution": Convolution(taps=2, groups=8),
        "block_size": 16,
        "windows": (12, 12),
        "causal": (True, False),
    },
}


class Pair:
    """An engine, the tokens committed to its slots, and the truth about the drafts behind them."""

    def __init__(self, engine: Measured, target: Path, drafter: Path, dims: DFlashDims) -> None:
        assert engine.manifest.drafting.dims == dims
        self.engine, self.dims, self.truth = engine, dims, truths(target, dims.tap_layers)
        self.target, self.dflash = target, DFlash(drafter, dims, self.truth)
        self.rng = np.random.default_rng(11)
        self.tokens: dict[int, list[int]] = {0: [], 1: []}

    def prefill(self, length: int, slot: int = 0) -> None:
        """Append random tokens, a chunk at a time."""
        for start in range(0, length, CHUNK):
            tokens = self.rng.integers(0, TARGET_DIMS.vocab_size - 1, min(CHUNK, length - start))
            self.engine.prefill(slot, tokens, rows="none", taps=True)
            self.tokens[slot] += tokens.tolist()

    def commit(self, *nodes: int, slot: int = 0) -> None:
        """Commit a path of a random tree for each of `nodes`."""
        for node in nodes:
            tree = random_tree(self.rng, 12, TARGET_DIMS.vocab_size)
            path = path_to(tree, node)
            self.engine.verify([VerifyRequest(slot, tree)])
            self.engine.commit(slot, path, taps=True)
            self.tokens[slot] += tree.token_ids[path].tolist()

    def truncate(self, length: int, slot: int = 0) -> None:
        del self.tokens[slot][length:]
        self.engine.truncate(slot, length)

    def back_to(self, length: int) -> None:
        """As a scheduler does for a prompt of that length whose beginning is cached."""
        self.truncate(self.engine.draftable(0, length))
        self.prefill(length - self.engine.length(0))

    def drafted(self, *bonus: int) -> list[Any]:
        """A draft behind each slot, from 0 on, in one call."""
        requests = [DraftRequest(slot, token, TOP_K, self.dims.draft_length) for slot, token in enumerate(bonus)]
        return [draft.candidates for draft in self.engine.draft(requests)]

    def draft(self, slots: int = 1) -> None:
        """Every candidate of the drafts, by rank and by token, is the plain statement's."""
        bonus = self.rng.integers(50, size=slots).tolist()
        for slot, found in enumerate(self.drafted(*bonus)):
            self._check(found, self.truth(self.tokens[slot])[1], bonus[slot], f"draft behind {len(self.tokens[slot])}")

    def _check(self, found: Any, states: np.ndarray, bonus: int, what: str) -> None:
        if isinstance(found, Bilinear):
            self._check_pairs(found, states, bonus)
            return
        assert isinstance(found, Marginals)
        expected = self.dflash(states, bonus)
        assert found.log_probs.shape == (self.dims.draft_length, TOP_K)
        assert_close(found.log_probs, -np.sort(-expected, axis=-1)[:, :TOP_K], what)
        assert_close(found.log_probs, np.take_along_axis(expected, found.token_ids, axis=-1), f"{what}, by token")
        assert all(len(set(row)) == TOP_K for row in found.token_ids.tolist())

    def ids_of_head(self, found: Bilinear) -> list[list[int]]:
        """The candidates [L, C] by the ids of the drafter's head."""
        whole = self.dims.draft_vocab_size is None
        offsets = np.zeros(self.dims.vocab_size) if whole else self.dflash.w["d2t"].numpy()
        of_target = {int(i + offset): i for i, offset in enumerate(offsets)}
        return [[of_target[token] for token in ids] for ids in found.token_ids.tolist()]

    def _check_pairs(self, found: Bilinear, states: np.ndarray, bonus: int) -> None:
        """The candidates of every position are the largest logits, and every pair's score is the plain statement's."""
        hidden = self.dflash.hidden(states, bonus)
        assert len(found.unary) == len(hidden) == self.dims.draft_length
        logits, count = self.dflash.logits(hidden).numpy(), found.unary.shape[1]
        assert_close(found.unary, -np.sort(-logits, axis=-1)[:, :count], "unary scores")
        for position, draft_ids in enumerate(self.ids_of_head(found)):
            assert_close(found.unary[position], logits[position, draft_ids], "unary scores by token")
            assert len(set(draft_ids)) == count
            parents = [bonus] if position == 0 else found.token_ids[position - 1].tolist()
            for i, parent in enumerate(parents):
                scores = found.unary[position] + found.right[position] @ found.left[position, i]
                expected = self.dflash.scores(hidden, position, parent).numpy()[draft_ids]
                assert_close(scores, expected, f"position {position} after {parent}")


def target_of(path: Path, tied: bool) -> Path:
    """One for all drafters of a process."""
    made = path.parent / f"target-{tied}"
    return made if made.exists() else make_target(made, tied=tied, max_positions=4 * CHUNK)


def shaped(path: Path, build: Build, name: str) -> Pair:
    target, drafter = PACKAGED / "target", PACKAGED / "drafter"
    if name != "tiny":
        target = target_of(path, name != "block-8")
        drafter = make_drafter(path / "drafter", max_positions=4 * CHUNK, **SHAPES[name])
    engine = build(target, drafter, path / "engine", max_batch=2)
    return Pair(engine, target, drafter, engine.manifest.drafting.dims)


def varied(path: Path, build: Build, fields: dict[str, Any], *, tied: bool = True) -> Pair:
    target = target_of(path, tied)
    dims = make_variant(path / "drafter", max_positions=4 * CHUNK, **fields)
    with reading_variant(path / "drafter", dims):
        engine = build(target, path / "drafter", path / "engine", max_batch=2)
    return Pair(engine, target, path / "drafter", dims)


MADE = {
    **{name: partial(shaped, name=name) for name in SHAPES},
    **{name: partial(varied, fields=fields) for name, fields in {**VARIANTS, **PAIRS}.items()},
}
MATRIX = [
    *((name, build) for name in MADE for build in BUILDS),
    *((name, "native") for name in ("mixed", "few draft ids", "windows", "scaled", "dflash2", "pairs of draft ids")),
    *((name, "plugin") for name in ("anchor first", "draft ids", "scaled")),  # it has no windows
]


@pytest.mark.parametrize(("name", "build"), MATRIX)
def test_rounds(name: str, build: str, tmp_path: Path) -> None:
    """Behind prompts that are taken in by one pass of the drafter or by several, and contexts that end before, at and
    behind a window's edge; then rounds of uneven length, also two without a draft between them, and cuts: inside what
    the drafter's cache holds, and inside what it was told and has not taken in."""
    pair = MADE[name](tmp_path, {**BUILDS, **LOWERED}[build])
    if name in PAIRS:
        prompts = [WINDOW - 2]
    else:
        every = [1, 5, CHUNK, 2 * CHUNK + 30] if name in ("tiny", "block-16") else []  # how a prompt is divided
        edges = [1, WINDOW - 1, WINDOW] if "windows" in VARIANTS.get(name, {}) else []
        prompts = [*every, *edges, CHUNK + 1]
    for prompt in prompts:
        pair.truncate(0)
        pair.prefill(prompt)
        reached = min(prompt, WINDOW) if pair.dims.windows and all(pair.dims.windows) else prompt
        assert pair.engine.unseen(0) == (reached if build == "onnxruntime" else 0)
        pair.draft()
        assert pair.engine.unseen(0) == 0
        for nodes in ((0,), (11,), (1, 6), (4,)):
            pair.commit(*nodes)
            pair.draft()
    for length in (CHUNK - 5, 2 * WINDOW):
        pair.back_to(min(length, pair.engine.length(0)))
        pair.commit(6)
        pair.draft()
    pair.back_to(8)
    pair.prefill(9)
    pair.back_to(12)
    pair.draft()
    pair.commit(*[11] * 30)  # more than wait for a draft
    pair.draft()


CALLS = [*((n, b) for n in ("block-16", "dspark") for b in (*BUILDS, *LOWERED)), ("block-8", "two ranks")]


@pytest.fixture(scope="module", params=CALLS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    (name, build), path = request.param, tmp_path_factory.mktemp("pair")
    if build != "two ranks":
        yield MADE[name](path, {**BUILDS, **LOWERED}[build])
        return
    one = MADE[name](path, build_torch_engine)
    one.engine.close()
    with request.getfixturevalue("ranks").open(path / "engine") as engine:
        yield Pair(engine, one.target, path / "drafter", one.dims)


def test_two_drafts_without_new_states(pair: Pair) -> None:
    pair.truncate(0)
    pair.prefill(4)
    pair.draft()
    if isinstance(pair.engine, OrtEngine):  # whose graph takes in states whenever it drafts
        with pytest.raises(EngineError, match="no new target states"):
            pair.draft()
    else:
        pair.draft()
    pair.commit(3)
    pair.draft()


def test_slots_of_a_call_are_independent(pair: Pair) -> None:
    for slot, length in enumerate((3, 31)):
        pair.truncate(0, slot)
        pair.prefill(length, slot)
    for nodes in ((0, 11), (7, 2)):
        pair.draft(slots=2)
        for slot, node in enumerate(nodes):
            pair.commit(node, slot=slot)


@pytest.mark.parametrize(
    ("name", "temperature"), [("anchor first", 1.0), ("mixed", 0.0), ("few draft ids", 0.0), ("few draft ids", 1.0)]
)
def test_device_rounds_are_the_hosts(name: str, temperature: float, tmp_path: Path) -> None:
    """Tokens and acceptance of every round, and the tokens of `ar`."""
    varied(tmp_path, build_torch_engine, VARIANTS[name]).engine.close()
    prompts = [f"t{i} t{2 * i}" for i in (3, 11)]
    settings: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    found = {}
    for mode in ("off", "on"):
        with LLM(tmp_path / "engine", threads=1, device_rounds=mode) as llm:
            found[mode] = llm.generate(prompts, SamplingParams(method="ddtree", tree_budget=16, **settings))
            if mode == "off":
                plain = llm.generate(prompts, SamplingParams(method="ar", **settings))
    for ar, host, device in zip(plain, found["off"], found["on"], strict=True):
        assert device.metrics.on_device and not host.metrics.on_device
        assert ar.outputs[0].token_ids == host.outputs[0].token_ids == device.outputs[0].token_ids
        assert host.metrics.acceptance_lengths == device.metrics.acceptance_lengths


@pytest.mark.parametrize(
    ("fields", "tied", "bound"), [({}, True, 0.6), ({}, False, 0.6), (VARIANTS["few draft ids"], True, 0.3)]
)
def test_marginals_in_8_bits(fields: dict[str, Any], tied: bool, bound: float, tmp_path: Path) -> None:
    """To 8 bits' rounding. A head of its own is rotated as the target's is, ids are mapped, and the windows hold."""
    pair = varied(tmp_path, partial(build_engine, precision="int8"), fields, tied=tied)
    pair.prefill(3 * WINDOW)
    (draft,) = pair.drafted(7)
    expected = np.take_along_axis(pair.dflash(pair.truth(pair.tokens[0])[1], 7), draft.token_ids, axis=-1)
    assert_near(draft.log_probs, expected, expected.std(), bound)
    assert np.abs(draft.log_probs - expected).max() > 1e-4  # it is in 8 bits


@pytest.mark.parametrize("name", ["markov-gated", "dspark", "pairs of draft ids", "dflash2"])
def test_pairs_in_8_bits(name: str, tmp_path: Path) -> None:
    """To 8 bits' rounding: the candidates' unary scores, and what pairs of them add, whose weights are not rounded but
    whose hidden states are."""
    pair = varied(tmp_path, partial(build_engine, precision="int8"), PAIRS[name])
    pair.prefill(30)
    (found,), dflash = pair.drafted(7), pair.dflash
    hidden = dflash.hidden(pair.truth(pair.tokens[0])[1], 7)
    logits, draft_ids = dflash.logits(hidden).numpy(), np.array(pair.ids_of_head(found))
    expected = np.take_along_axis(logits, draft_ids, axis=-1)
    assert_near(found.unary, expected, logits.std())
    assert np.abs(found.unary - expected).max() > 1e-4  # it is in 8 bits
    before = [[7] * draft_ids.shape[1], *found.token_ids[:-1].tolist()]
    added = np.array(
        [
            [dflash.scores(hidden, t, parent).numpy()[ids] - logits[t, ids] for parent in before[t]]
            for t, ids in enumerate(draft_ids)
        ]
    )
    assert_near(np.einsum("lar,lbr->lab", found.left, found.right), added, added.std())


def assert_near(found: np.ndarray, expected: np.ndarray, spread: float, bound: float = 0.6) -> None:
    """The bounds of drafts in 8 bits."""
    error = np.abs(found - expected)
    assert error.max() < bound * spread and error.mean() < 0.2 * spread
