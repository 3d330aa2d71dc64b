"""Engines whose weights are in FP8, on the packaged pair, emulated on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import make_manifest

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.drafters.dflash.on_torch import BlockDrafter
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import Experts
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.products import Scaled
from ddtree_trt.runtime.engines.torch.weights import quantise
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.options import EngineOptions, Fp8
from ddtree_trt.runtime.params import SamplingParams

PROMPTS = ["There are 6 drawers, each with 32 cards. How many cards are there?", "def add(a, b):"]


def answers(directory: Path, fp8: Fp8, **params: Any) -> tuple[list[list[int]], float]:
    """Tokens of every prompt, and tokens a round."""
    with LLM(directory, threads=1, fp8=fp8) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, **params), use_tqdm=False)
    rounds = sum(output.metrics.rounds for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], 80 / rounds


def test_a_drafter_in_fp8_changes_no_text_and_drafts_as_well(directory: Path) -> None:
    expected, _ = answers(directory, "off", method="ar")
    tree: dict[str, Any] = {"method": "ddtree", "tree_budget": 16}
    (plain, tau), (found, own_tau) = answers(directory, "off", **tree), answers(directory, "drafter", **tree)
    assert plain == found == expected
    assert own_tau > 0.9 * tau > 1.8


def test_a_target_in_fp8_is_lossless_by_itself(directory: Path) -> None:
    expected, _ = answers(directory, "on", method="ar")
    found, tau = answers(directory, "on", method="ddtree", tree_budget=16)
    assert found == expected and tau > 2


def test_which_matrices_are_in_fp8(directory: Path) -> None:
    found = {}
    for fp8 in ("off", "drafter", "on"):
        engine = open_engine(directory, threads=1, fp8=fp8)
        assert isinstance(engine, TorchEngine) and isinstance(engine.drafter, BlockDrafter)
        network, drafter = engine.target.network, engine.drafter.model
        weights = network._decoder.layers[0].qkv, network.head, network.embedding, drafter._decoder.layers[0].down
        found[fp8] = [isinstance(w, Scaled) for w in (*weights, drafter._head, drafter._fc)]
        assert engine.manifest.toolchain.get("fp8", "") == {"on": "drafter target", "off": ""}.get(fp8, fp8)
        engine.close()
    assert found["off"] == [False] * 6
    assert found["drafter"] == [False, False, False, True, True, True]
    assert found["on"] == [True, False, False, True, True, True]


def test_what_cannot_be_in_fp8_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(UsageError, match="fp8 'drafter' is for engines with a drafter of blocks"):
        quantise({}, make_manifest(6, "autoregressive", 4, Limits()), "drafter")
    dense = make_manifest(6, "dflash", 4, Limits())
    mixture = replace(dense, target_dims=replace(dense.target_dims, experts=Experts(8, 3, normalised=True)))
    with pytest.raises(UsageError, match="targets of attention and dense layers alone"):
        quantise({}, mixture, "on")
    with pytest.raises(UsageError, match="fp8 is for engines of the torch backend"):
        open_engine(tiny_engine, fp8="on")
    with pytest.raises(UsageError, match="weights of a split target are not quantised"):
        EngineOptions(tensor_parallel_size=2, fp8="on")
