"""The target engine against transformers in float32: prefill, branching trees, compaction, reuse."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BY_SWITCHES, SCALINGS, make_pair
from engine_builds import PACKAGED, build_engine, build_torch_engine
from fake_trt_engine import FORMS, build_trt_engine
from numerics import Follower, path_to, random_tree, truths

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.device.buffers import tree_sizes
from ddtree_trt.models.decoder import Experts
from ddtree_trt.models.families import FAMILIES, LLAMA, QWEN3, QWEN3_MOE

CHUNK = Limits.prefill_chunk
NODES = 10
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"tied": False},
    "heads-1-1": {"num_heads": 4, "num_kv_heads": 4},
    "heads-4-1": {"num_heads": 4, "num_kv_heads": 1},
    "heads-8-1": {"num_heads": 8, "num_kv_heads": 1, "tied": False},
    "one-layer": {"num_layers": 1},
    "odd-vocabulary": {"vocab_size": 97, "tied": False},
    "large-heads": {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1},
    "small-heads": {"head_dim": 16, "hidden_size": 128, "num_heads": 3, "num_kv_heads": 1},
    "rotary": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "dtype": "bf16"},
    **{name: {"family": family} for name, family in FAMILIES.items() if family is not QWEN3},
    "qwen3_moe-untied": {"family": QWEN3_MOE, "experts": Experts(16, 4, normalised=False), "tied": False},
    "qwen3_moe-one": {"family": QWEN3_MOE, "experts": Experts(1, 1, normalised=True), "intermediate_size": 32},
    **{f"rope-{name}": {"rope_scaling": scaling, "family": LLAMA, "tied": False} for name, scaling in SCALINGS.items()},
    "rope-yarn-tied": {"rope_scaling": SCALINGS["yarn"]},
    **{f"{name}-untied": {"family": family, "tied": False} for name, family in BY_SWITCHES.items()},
}


BUILDS: dict[str, Any] = {
    "onnxruntime": build_engine,
    "torch": build_torch_engine,
    "torch, padded": build_torch_engine,
    "two ranks": None,  # opened by the fixture `ranks`
    # The graphs of TensorRT engines, run by ONNX Runtime on pretended machines, in slots of an odd number of rows.
    **{form: partial(build_trt_engine, form=FORMS[form], max_seq_len=319, max_tree_budget=40) for form in FORMS},
}
ON_TENSORRT = ("tiny", "untied", "heads-4-1", "one-layer", "large-heads", "rope-yarn-tied", *BY_SWITCHES)
HYBRIDS = {name for name, family in FAMILIES.items() if family.delta}
OVER_RANKS = {"untied", "heads-4-1", "odd-vocabulary", "llama-untied", "qwen2-untied", "qwen3_moe"}
ELSEWHERE = {*HYBRIDS, "llama-untied"}  # `test_hybrids` follows hybrids through more than this
SOME = {
    "onnxruntime": {*SHAPES, "tiny"} - ELSEWHERE,
    "torch": {*SHAPES, "tiny"} - ELSEWHERE - {"heads-1-1", "one-layer", "rotary", "rope-linear"},
    **dict.fromkeys(FORMS, ON_TENSORRT),
    "native": (*ON_TENSORRT, "qwen3_5_text"),
    "two ranks": OVER_RANKS,
    "torch, padded": ("tiny", "untied", "qwen3_5_text"),
}
MATRIX = [(name, build) for name in ("tiny", *SHAPES) for build in BUILDS if name in SOME.get(build, (name,))]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The packaged pair, and random checkpoints of every kind of shape."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        path = tmp_path_factory.mktemp(name)
        packaged = PACKAGED / "target", PACKAGED / "drafter"
        return packaged if name == "tiny" else make_pair(path, max_positions=2 * CHUNK, **SHAPES[name])

    return make


@pytest.fixture(scope="module", params=MATRIX, ids="-".join)
def followers(
    request: pytest.FixtureRequest, targets: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Follower]]:
    """Both slots of an engine."""
    (name, build), path = request.param, tmp_path_factory.mktemp("engine")
    target, drafter = targets(name)
    with ExitStack() as opened:
        if build == "two ranks":
            build_torch_engine(target, drafter, path / "engine", max_batch=2).close()
            engine = opened.enter_context(request.getfixturevalue("ranks").open(path / "engine"))
        else:
            engine = BUILDS[build](target, drafter, path / "engine", max_batch=2)
        if build == "torch, padded":  # to the sizes of a GPU
            engine.target.buckets = tree_sizes(engine.limits.max_tokens_per_pass)
        truth = truths(target, engine.manifest.drafting.dims.tap_layers)
        yield [Follower(engine, slot, truth) for slot in range(2)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def slot(followers: list[Follower]) -> Follower:
    followers[0].truncate(0)
    return followers[0]


def vocabulary(slot: Follower) -> int:
    return slot.engine.manifest.target_dims.vocab_size


# How a prompt is divided is the engine's matter and not the shape's: every border for some shapes, on every backend.
EVERY_PAST = ("tiny", "untied")


def test_rounds_behind_a_prompt(slot: Follower, rng: np.random.Generator, request: pytest.FixtureRequest) -> None:
    """Trees, each behind what the one before it committed: the root, a path that must be moved, one that need not."""
    shape, _ = request.node.callspec.params["followers"]
    for past in (1, 9, CHUNK - 1, CHUNK, CHUNK + 1) if shape in EVERY_PAST else (9, CHUNK + 1):
        slot.truncate(0)
        prompt = rng.integers(0, vocabulary(slot), past).tolist()
        for start in range(0, past, CHUNK):
            slot.prefill(prompt[start : start + CHUNK])
        for node in (0, NODES - 1, 1):
            tree = random_tree(rng, NODES, vocabulary(slot))
            slot.verify(tree)
            slot.commit(path_to(tree, node))
        slot.prefill(rng.integers(0, vocabulary(slot), 3))


def test_a_tree_that_is_not_committed_leaves_no_trace(slot: Follower, rng: np.random.Generator) -> None:
    """Behind a prompt in chunks of any size."""
    for size in (5, 1, 30, 1, 2):
        slot.prefill(rng.integers(0, vocabulary(slot), size))
    for _ in range(2):
        slot.verify(random_tree(rng, NODES, vocabulary(slot)))
    slot.commit(np.array([0], np.int32))
    slot.verify(random_tree(rng, 1, vocabulary(slot)))


def test_a_truncated_slot_goes_on_with_other_tokens(slot: Follower, rng: np.random.Generator) -> None:
    for length, more in ((0, 20), (13, 4), (17, 1), (1, 8)):
        slot.truncate(min(length, len(slot.tokens)))  # a hybrid went back to less
        slot.prefill(rng.integers(0, vocabulary(slot), more))
        tree = random_tree(rng, NODES, vocabulary(slot))
        slot.verify(tree)
        slot.commit(path_to(tree, NODES - 1))


def test_slots_are_independent(followers: list[Follower], rng: np.random.Generator) -> None:
    """Two sequences of different lengths in one call, in any order, and one of them alone in between."""
    engine, vocab = followers[0].engine, vocabulary(followers[0])
    for follower, length in zip(followers, (3, 19), strict=True):
        follower.truncate(0)
        follower.prefill(rng.integers(0, vocab, length))
    for nodes, order in (((NODES, 5), 1), ((2, NODES), -1)):
        trees = [random_tree(rng, n, vocab) for n in nodes]
        pairs = list(zip(followers, trees, strict=True))[::order]
        verdicts = engine.verify([follower.request(tree) for follower, tree in pairs])
        for (follower, _), verdict in zip(pairs, verdicts, strict=True):
            follower.check(verdict)
        for follower, tree in pairs:
            follower.commit(path_to(tree, len(tree) - 1))
        followers[1].verify(trees[0])
        followers[1].commit(path_to(trees[0], 1))
