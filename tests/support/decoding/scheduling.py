"""Requests of the scheduler tests, what each says alone, and engines that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from scripted import ScriptedEngine, completion, finish
from scripted_models import Good, MarkovTarget

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.sequence import Sequence as Completion

TARGET = MarkovTarget(vocab_size=7, seed=1)
CHUNK = 8


def make(slots: int = 4, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(TARGET, Good(TARGET), max_batch=slots, prefill_chunk=CHUNK, **options)


def prompt(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, size).tolist()


# Sixteen requests that differ in everything; sampled ones are seeded, and drawn drafts use their own generator too.
MIXED: list[tuple[list[int], SamplingParams]] = [
    (prompt(1, 3), SamplingParams(max_tokens=9)),
    (prompt(2, 1), SamplingParams(max_tokens=20, method="ar")),
    (prompt(3, 20), SamplingParams(max_tokens=5, method="dflash")),
    (prompt(4, 8), SamplingParams(max_tokens=1)),
    (prompt(5, 9), SamplingParams(max_tokens=12, tree_budget=1)),
    (prompt(6, 2), SamplingParams(max_tokens=12, tree_budget=40)),
    (prompt(7, 4), SamplingParams(max_tokens=12, frequency_penalty=1, repetition_penalty=1.3)),
    (prompt(8, 30), SamplingParams(max_tokens=3, method="dflash-sample")),
    (prompt(9, 5), SamplingParams(max_tokens=15, temperature=1, seed=1)),
    (prompt(10, 5), SamplingParams(max_tokens=15, temperature=0.7, top_k=3, seed=2, method="dflash-sample")),
    (prompt(11, 16), SamplingParams(max_tokens=7, temperature=1, seed=3, method="ar", logprobs=2)),
    (prompt(1, 3), SamplingParams(max_tokens=9, stop=("ab",))),
    (prompt(12, 17), SamplingParams(max_tokens=8, stop_token_ids=(2,), prompt_logprobs=1)),
    (prompt(13, 6), SamplingParams(max_tokens=10, logit_bias={3: 2.0}, method="dflash")),
    (prompt(14, 7), SamplingParams(max_tokens=11, tree_budget=0)),
    (prompt(15, 40), SamplingParams(max_tokens=60)),  # meets the engine's capacity
]


def said(c: Completion) -> tuple[Any, ...]:
    return c.output, c.stream.text, c.finish_reason, c.stop_reason, c.logprobs, c.prompt_logprobs


def alone(index: int) -> tuple[Any, ...]:
    engine = make()
    c = completion(engine, *MIXED[index])
    finish(Scheduler(engine), [c])
    return said(c)


ALONE = [alone(i) for i in range(len(MIXED))]


# Failures


def failing(engine: ScriptedEngine, verb: str, slot: int | None = None) -> None:
    """Let the engine fail at its next `verb`, for calls that name the slot."""

    def fail(called: str, slots: tuple[int, ...]) -> None:
        if called == verb and (slot is None or slot in slots):
            engine.fail = lambda verb, slots: None
            raise EngineError(f"{verb} failed")

    engine.fail = fail
