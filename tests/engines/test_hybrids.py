"""Hybrids on engines, against transformers and themselves: rounds, states, snapshots and texts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import delta_truth
import numpy as np
import pytest
import torch
from checkpoints import DELTA, dims_of, make_pair
from engine_builds import build_engine, build_torch_engine
from numerics import Follower, Truth, assert_close, follow_paths, path_to

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.device.memory import plan_engine
from ddtree_trt.errors import EngineError
from ddtree_trt.models.families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import TokenTree, token_chain

VOCABULARY = 96
TOKENS = 30  # of a text: behind most prompts past a snapshot, of which there is one every 32 tokens
NETS: dict[str, Any] = {
    "qwen3_next": {
        "family": QWEN3_NEXT,
        "num_layers": 4,
        "delta": replace(DELTA, attention_layers=(1, 3), interleaved=QWEN3_NEXT.interleaved),
        "tied": False,
    },
    "qwen3_5": {"family": QWEN3_5, "num_layers": 4},
    "qwen3_5-one": {"family": QWEN3_5, "num_layers": 1, "delta": replace(DELTA, attention_layers=())},
    "qwen3_5-shapes": {
        "family": QWEN3_5,
        "num_layers": 2,
        "delta": replace(DELTA, key_heads=1, value_heads=3, value_dim=16, taps=2, attention_layers=(0,)),
        "rotary_dim": 4,
        "tied": False,
    },
    "qwen3_5_moe": {"family": QWEN3_5_MOE, "num_layers": 3},
}


BUILDS: dict[str, Any] = {"onnxruntime": build_engine, "torch": build_torch_engine}
Engine = OrtEngine | TorchEngine


@pytest.fixture(scope="module", params=NETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("hybrid") / request.param
    return make_pair(path, max_positions=1024, **NETS[request.param])


@pytest.fixture(scope="module", params=BUILDS)
def directory(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Path:
    path = pair[0].parent / request.param
    options: dict[str, Any] = {"max_batch": 3, "max_seq_len": 1024, "snapshot_every": 32}
    BUILDS[request.param](*pair, path, **options).close()
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    engine = open_engine(directory, threads=1)
    assert isinstance(engine, Engine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def truth(pair: tuple[Path, Path]) -> Truth:
    return Truth(pair[0], load_checkpoint(pair[1]).kind.tap_layers)


def states_in(engine: Engine, slot: int) -> list[np.ndarray]:
    """By delta-net layer: what the slot keeps, the state and then the convolution's last inputs."""
    if isinstance(engine, OrtEngine):
        states = engine.target.cache.states
        return [] if states is None else list(states.values[:, slot])
    found = engine.target.cache.states
    parts = () if found is None else (found._states[:, slot], found._past[:, slot])
    return list(torch.cat([part.flatten(1) for part in parts], 1).numpy()) if parts else []


def deep_tree(rng: np.random.Generator, nodes: int, depth: int) -> TokenTree:
    parents = delta_truth.random_parents(rng, nodes, depth)
    depths = [len(delta_truth.path_to(parents, node)) - 1 for node in range(nodes)]
    tokens = rng.integers(0, VOCABULARY, nodes)
    return TokenTree(tokens, np.array(parents, np.int32), np.array(depths, np.int32))


def feed(slot: Follower, tokens: np.ndarray, *, ends: bool = False) -> None:
    """A chunk of a prompt, which ends with it or goes on."""
    slot.tokens += tokens.tolist()
    slot.engine.prefill(slot.slot, tokens, rows="last" if ends else "none", taps=True)
    slot._told.clear()


def states_of_transformers(truth: Truth, tokens: list[int]) -> list[np.ndarray]:
    """By delta-net layer: the states behind the tokens, and the convolution's last inputs, as engines store them."""
    with torch.inference_mode():
        cache = truth.model(torch.tensor([tokens]), use_cache=True).past_key_values
    found = []
    for layer in cache.layers:
        if getattr(layer, "recurrent_states", None):
            conv = layer.conv_states[0][0].T.numpy()
            taps = truth.model.config.linear_conv_kernel_dim
            state = layer.recurrent_states[0][0].numpy()
            found.append(np.concatenate([state.ravel(), conv[-(taps - 1) :].ravel()]))
    return found


@pytest.mark.parametrize("seed", [5, *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 12))])
def test_rounds_in_a_row(engine: Engine, truth: Truth, seed: int) -> None:
    """200 rounds behind prompts of every length around the convolution's: every 40th wholly compared, of every 8th
    a path; at the end the states are those of all tokens at once."""
    rng = np.random.default_rng(seed)
    slot = Follower(engine, 0, truth)
    for length in (1, 3, 4, 5):
        slot.truncate(0)
        slot.prefill(rng.integers(0, VOCABULARY, length))
    for turn in range(200):
        tree = deep_tree(rng, int(rng.choice([1, 2, 9, 17, 65, 257] if turn % 10 == 0 else [1, 5, 17])), 16)
        node = int(rng.integers(len(tree)))
        path = path_to(tree, node)
        if len(slot.tokens) + len(path) > 900:
            break
        (verdict,) = engine.verify([slot.request(tree)])
        if turn % 8:
            slot.tokens += tree.token_ids[path].tolist()
            engine.commit(0, path, taps=True)
            slot._told.clear()
            continue
        if turn % 40 == 0 and len(tree) < 40:
            slot.check(verdict)
        logits, _ = truth([*slot.tokens, *tree.token_ids[path].tolist()])
        assert_close(np.asarray(verdict.logits)[path], logits[-len(path) :], f"turn {turn}", 2e-4)
        slot.commit(path)
    else:
        assert len(slot.tokens) > 200
    if engine.manifest.target_dims.attention_layers:  # without one transformers has no cache
        for found, expected in zip(states_in(engine, 0), states_of_transformers(truth, slot.tokens), strict=True):
            assert_close(found, expected, "states", 1e-4)


def test_snapshots(engine: Engine, truth: Truth) -> None:
    """At every 32nd token, and before a prompt's last one; what was committed behind them leaves no trace."""
    rng = np.random.default_rng(1)
    slot, hybrid = Follower(engine, 0, truth), states_in(engine, 0)
    slot.truncate(0)
    slot.prefill(rng.integers(0, VOCABULARY, 50))
    feed(slot, np.array([5, 6, 7]), ends=True)
    for length in (70, 40, 20, 13):
        slot.verify(tree := deep_tree(rng, length, 16))
        slot.commit(path_to(tree, int(tree.depths.argmax())))
    held = engine.length(0)
    assert held > 64
    if hybrid:
        restorable = [engine.restorable(0, n) for n in (31, 32, 51, 52, 53, 63, 64, held - 1, held)]
        assert restorable == [0, 32, 32, 52, 52, 52, 64, 64 if held - 1 < 96 else 96, held]
    for length in (held, 64, 60, 52, 40, 32, 20, 0):
        slot.truncate(length)
        slot.prefill(rng.integers(0, VOCABULARY, 3))
        slot.truncate(len(slot.tokens))
        if slot.tokens:
            slot.verify(deep_tree(rng, 5, 4))
    with pytest.raises(EngineError, match="cannot keep"):
        engine.truncate(0, 500)


def test_a_commit_belongs_to_the_last_pass(engine: Engine) -> None:
    if not states_in(engine, 0):
        return
    for slot in (0, 1):
        engine.truncate(slot, 0)
        engine.verify([VerifyRequest(slot, token_chain(np.array([3, 4])))])
    engine.commit(1, np.array([0, 1], np.int32), taps=False)
    for slot in (0, 1):
        with pytest.raises(EngineError, match=f"slot {slot} was not in the last( target)? pass"):
            engine.commit(slot, np.array([0], np.int32), taps=False)


def test_paths_have_the_bits_of_single_tokens(directory: Path) -> None:
    """Trees beside those of other slots, on several threads."""
    rng, manifest = np.random.default_rng(2), load_manifest(directory)
    engine, alone = (open_engine(directory, threads=t) for t in (2, 1))
    exact = engine.inexact is None
    assert exact == (manifest.backend == "onnxruntime" and manifest.target_dims.experts is None)
    same = np.testing.assert_array_equal if exact else partial(assert_close, what="a row")
    for slot, length in enumerate((1, 40, 300)):
        prompt = rng.integers(0, VOCABULARY, length)
        for start in range(0, length, 200):
            engine.prefill(slot, prompt[start : start + 200], rows="none", taps=False)
        for start in range(0, length, 7):
            alone.prefill(slot, prompt[start : start + 7], rows="none", taps=False)
    for _ in range(3):
        trees = {slot: deep_tree(rng, int(rng.integers(1, 130)), 16) for slot in range(3)}
        follow_paths(engine, alone, trees, same)
    engine.close()
    alone.close()


def tokens_of(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, **params))
    return [output.outputs[0].token_ids for output in outputs]


def test_texts(directory: Path) -> None:
    """Of every method and size, of prompts of mixed lengths at a time, stopped within paths and begun again behind a
    snapshot: those of `ar`, prompt by prompt."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCABULARY, n).tolist() for n in (1, 3, 4, 5, 33, 70, 300)]
    with LLM(directory, threads=1) as llm:
        expected = [tokens_of(llm, [prompt], method="ar", skip_reading_prefix_cache=True)[0] for prompt in prompts]
        sizes: list[dict[str, Any]] = [{"method": "ar"}, {"method": "dflash"}]
        sizes += [{"method": "ddtree", "tree_budget": nodes} for nodes in (90, "auto")]
        for each in sizes:
            assert tokens_of(llm, prompts, **each) == expected, each
        again = [llm.generate([prompts[5]], SamplingParams(max_tokens=4))[0].metrics.cached_tokens for _ in range(2)]
        assert again[1] == 69, "what comes before the last token of a prompt is kept"
        stop = expected[4][11]
        sampling: dict[str, Any] = {**sizes[2], "max_tokens": TOKENS, "ignore_eos": True}
        params = SamplingParams(temperature=0.0, stop_token_ids=(stop,), **sampling)
        cut = llm.generate([prompts[4]], params)[0].outputs[0].token_ids
        assert cut == expected[4][: expected[4].index(stop) + 1]
        grown = [*prompts[4], *cut, 9]
        fresh = tokens_of(llm, [grown], method="ar", skip_reading_prefix_cache=True)
        llm.generate([prompts[4]], params)
        assert tokens_of(llm, [grown], method="ddtree", tree_budget=16) == fresh


def test_memory() -> None:
    """A forecast has a state and its snapshots for every slot."""
    dims, limits = dims_of(QWEN3_5), Limits(1024, 1, snapshot_every=32)
    assert limits.snapshots == 1 + 1024 // 32
    plans = [plan_engine("torch", "fp32", dims, dims, each, 0) for each in (limits, Limits(1024, 1))]
    assert plans[0].kv_bytes_per_slot - plans[1].kv_bytes_per_slot == 32 * dims.state_bytes
