"""Drafters with a head for pairs, and autoregressive ones, on the TensorRT engine over fake device memory, beside the
ONNX Runtime engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_target, make_variant, reading_variant
from engine_builds import PACKAGED
from fake_trt_engine import FORMS, Lowerings, Machine, generate, installed
from fake_trt_engine import PROMPTS as PACKAGED_PROMPTS

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.device import buffers
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM

LIMITS = Limits(max_seq_len=120, max_batch=3, max_tree_budget=40, prefill_chunk=32)
PROMPTS = ["t3 t6", " ".join(f"t{i}" for i in range(2, 45)), "t7 t9 t11"]
HEADS: dict[str, dict[str, Any]] = {
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
# Of an autoregressive drafter: other shapes, one layer, a head that is not its embedding.
OTHER: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 48,
    "num_layers": 1,
    "head_dim": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
}
Pair = tuple[LLM, LLM, Machine]  # on TensorRT, on ONNX Runtime, the machine


def opened(folder: Path, target: Path, drafter: Path, limits: Limits, form: str, reading: Any) -> Iterator[Pair]:
    given: dict[str, Any] = {n: getattr(limits, n) for n in ("max_seq_len", "max_batch", "max_tree_budget")}
    with reading:
        compile_engine(BuildRequest(target="x", checkpoint=target, drafter=drafter, output=folder / "ort", **given))
        lowerings = Lowerings(folder, target, drafter, folder / "ort", limits, "fp32", FORMS[form])
    with installed(lowerings.machine()) as machine, LLM(folder / "ort", threads=1) as reference:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            yield llm, reference, machine
        assert not machine.cuda.leaks


@pytest.fixture(scope="module", params=[(kind, form) for kind in HEADS for form in FORMS], ids=", ".join)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, form = request.param
    folder = tmp_path_factory.mktemp("heads")
    target, drafter = make_target(folder / "target"), folder / "drafter"
    dims = make_variant(drafter, **HEADS[kind])
    for pair in opened(folder, target, drafter, LIMITS, form, reading_variant(drafter, dims)):
        assert isinstance(pair[0].engine, TrtEngine) and pair[0].engine.manifest.drafting.dims == dims
        yield pair


@pytest.fixture(scope="module", params=[("itself", "native"), ("another network", "plugin")], ids=", ".join)
def autoregressive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The packaged target, drafted for by itself or by another network."""
    kind, form = request.param
    folder, target = tmp_path_factory.mktemp("pair"), PACKAGED / "target"
    drafter = target
    if kind != "itself":
        drafter = make_target(folder / "drafter", tokenizer=False, tied=False, seed=3, max_positions=512, **OTHER)
    limits = Limits(max_seq_len=256, max_batch=3, max_tree_budget=40, prefill_chunk=32)
    yield from opened(folder, target, drafter, limits, form, nullcontext())


def assert_same_rounds(pair: Pair, prompts: list[str], **options: Any) -> list[Any]:
    """Slots of different lengths; more prompts than slots, so that a slot starts behind what it held."""
    found, expected = (generate(llm, prompts, **options) for llm in pair[:2])
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.metrics.acceptance_lengths for o in found] == [o.metrics.acceptance_lengths for o in expected]
    return found


def assert_greedy_is_ar(llm: LLM, prompts: list[str], method: str) -> None:
    plain, drafted = (generate(llm, prompts, method=each) for each in ("ar", method))
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]


def test_rounds_of_a_head_for_pairs(heads: Pair) -> None:
    assert_greedy_is_ar(heads[0], PROMPTS * 2, "ddtree")
    # Drawn from a flat distribution: a random drafter never names the most probable token.
    found = assert_same_rounds(heads, PROMPTS * 2, method="ddtree", tree_budget=40, temperature=9.0, seed=3)
    assert max(length for o in found for length in o.metrics.acceptance_lengths) > 1, "a draft was accepted"


@pytest.mark.parametrize(
    ("length", "options"), [(3, {}), (4, {"temperature": 1.0, "top_p": 0.95, "seed": 3})], ids=["greedy", "drawn"]
)
def test_rounds_of_an_autoregressive_drafter(autoregressive: Pair, length: int, options: dict[str, Any]) -> None:
    prompts = [*PACKAGED_PROMPTS, PACKAGED_PROMPTS[0]]
    assert_same_rounds(autoregressive, prompts, method="draft-model", tree_budget=length, **options)


def test_an_autoregressive_drafter_is_lossless_and_takes_no_states(autoregressive: Pair) -> None:
    assert_greedy_is_ar(autoregressive[0], PACKAGED_PROMPTS, "draft-model")
    engine = autoregressive[0].engine
    assert isinstance(engine, TrtEngine) and isinstance(engine.drafter, AutoregressiveDrafter)
    assert not {buffers.TAPS, buffers.STATES, buffers.CONTEXT} & set(engine.layout.sizes), "nobody asks for states"


def test_drafted_tokens_are_one_captured_pass_each(autoregressive: Pair) -> None:
    llm, _, machine = autoregressive
    generate(llm, PACKAGED_PROMPTS[:1], method="draft-model")  # captured, and the prompt's tokens cached
    start = len(machine.cuda.log)
    (output,) = generate(llm, PACKAGED_PROMPTS[:1], method="draft-model")
    log = machine.cuda.log[start:]
    assert not [entry for entry in log if entry[0] in ("malloc", "capture")]
    rounds, drafted = output.metrics.rounds, output.metrics.drafted_tokens
    launches = sum(entry[0] == "launch" for entry in log)
    chunks = sum(entry[:2] == ("pass", "drafter") for entry in log)
    # What a round begins with is the tokens the drafter has not seen: one, or a few more as a chain.
    assert launches + chunks == rounds + drafted
    assert chunks <= rounds
