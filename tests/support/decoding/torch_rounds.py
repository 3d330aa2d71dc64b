"""Settings of the tests of device rounds."""

from __future__ import annotations

from typing import Any

from ddtree_trt.runtime.decoding.noise import Noise
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

TOKENS = 60
SLOTS = 3


def greedy(budget: int = 16, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "method": "ddtree", "tree_budget": budget, **options})


def rounds_of(llm: LLM) -> TorchRounds:
    assert isinstance(llm.engine, TorchEngine) and llm.engine.rounds is not None
    return llm.engine.rounds


def seed_of(seed: int | None, index: int) -> int:
    """What a request's completion `index` draws with on a device."""
    return Noise(seed, index).target_seed
