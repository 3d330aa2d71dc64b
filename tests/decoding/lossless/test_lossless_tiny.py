"""Losslessness on the packaged pair: the real engine, its kernels, its caches.

`pytest -m slow tests/decoding/lossless/test_lossless_tiny.py` compares every method on 40 prompts and draws
every token anew: minutes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import marginals
from scripted import completion, finish
from truth import FALSE_ALARM, chi_square

import ddtree_trt
from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler

PROMPTS = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "prompts.jsonl"
TOKENS = 128
SEEDS = 4000
# Two logits nearer than this may change places when the same tokens pass through the network in another shape.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    """Held-out prompts as chats, one of each kind in turn."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    rows = [rows[i] for offset in range(5) for i in range(offset, len(rows), 5)]
    return [[{"role": "user", "content": row["prompt"]}] for row in rows]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[Any]) -> list[CompletionOutput]:
    """What the target says by itself, with the two best tokens of each step."""
    params = SamplingParams(method="ar", max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    return [output.outputs[0] for output in llm.generate(prompts[:40], params)]


def assert_same(found: Sequence[int], expected: CompletionOutput) -> None:
    """Token for token, but for a step whose two best tokens the target itself cannot tell apart."""
    assert len(found) == len(expected.token_ids) == TOKENS
    for i, (a, b) in enumerate(zip(found, expected.token_ids, strict=True)):
        if a != b:
            assert expected.logprobs is not None
            (_, best), (_, second) = expected.logprobs[i].top
            assert best - second < ROUNDING, f"token {i}: {a} instead of {b}, which leads by {best - second:.3g}"
            return


def compare(llm: LLM, prompts: list[Any], plain: list[CompletionOutput], **method: Any) -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **method)
    outputs = llm.generate(prompts[: len(plain)], params)
    for output, expected in zip(outputs, plain, strict=True):
        assert_same(output.outputs[0].token_ids, expected)
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    if method.get("tree_budget") != "auto" or method["method"] != "ddtree":  # by its costs, auto may well not draft
        assert accepted > 0.2 * TOKENS * len(plain), "the drafter should be of use here"


@pytest.mark.parametrize(
    ("method", "budget", "count"),
    [
        ("ddtree", 16, 40),
        ("dflash", "auto", 12),
        ("ddtree", 1, 10),
        ("ddtree", 4, 10),
        ("ddtree", 64, 4),
        ("ddtree", 256, 2),
        ("ddtree", "auto", 10),
    ],
)
def test_greedy_output_is_that_of_ar(
    llm: LLM, prompts: list[Any], plain: list[CompletionOutput], method: str, budget: Any, count: int
) -> None:
    compare(llm, prompts, plain[:count], method=method, tree_budget=budget)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "method", [{"method": "dflash"}, *({"method": "ddtree", "tree_budget": b} for b in (1, 4, 64, 256))], ids=str
)
def test_greedy_output_is_that_of_ar_on_40_prompts(
    llm: LLM, prompts: list[Any], plain: list[CompletionOutput], method: dict[str, Any]
) -> None:
    assert len(plain) == 40
    compare(llm, prompts, plain, **method)


# At temperature 1

Change = Callable[[Draft], Draft]


def useless(draft: Draft) -> Draft:
    """The same two tokens everywhere, equally likely."""
    length, width = marginals(draft).token_ids.shape
    ids = np.tile(np.array([100, 101], np.int32)[:width], (length, 1))
    return Draft(Marginals(np.full(ids.shape, -np.log(2), np.float32), ids))


def adversarial(draft: Draft) -> Draft:
    """The drafter's own candidates upside down, and very sure of it."""
    own = marginals(draft)
    return Draft(Marginals(np.sort(4 * own.log_probs, axis=1)[:, ::-1].copy(), own.token_ids[:, ::-1].copy()))


CHANGES: dict[str, Change] = {"good": lambda draft: draft, "useless": useless, "adversarial": adversarial}


class Remembering:
    """The engine, with another drafter, that is asked every question once: what it says of given tokens is kept.

    A question is answered from the slot's tokens alone, wherever they came from, so that thousands of draws take
    seconds.
    """

    threads, rounds, buckets, lookahead, batches = 1, None, None, None, False

    def __init__(self, engine: Engine, change: Change) -> None:
        self.manifest = engine.manifest
        self._engine, self._change = engine, change
        slots = engine.manifest.limits.max_batch
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._trees: dict[int, VerifyRequest] = {}
        self._said: dict[Any, Any] = {}
        engine.truncate(0, 0)
        self._held: list[int] = []  # by slot 0 of the real engine, which answers for all

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    draftable_length = length

    def truncate(self, slot: int, length: int) -> None:
        del self._tokens[slot][length:]

    def prefill(self, slot: int, token_ids: Any, *, rows: LogitRows, taps: bool) -> Verdict:
        self._tokens[slot] += token_ids.tolist()
        tokens = self._tokens[slot]
        return self._ask(("prefill", tuple(tokens)), lambda: self._bring(tokens))

    def warm_up(self, progress: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._ask(self._draft_key(r), partial(self._draft, r)) for r in requests]

    def _draft_key(self, request: DraftRequest) -> Any:
        return "draft", tuple(self._tokens[request.slot]), request.bonus_token, request.top_k

    def _draft(self, request: DraftRequest) -> Draft:
        self._bring(self._tokens[request.slot])
        return self._change(self._engine.draft([replace(request, slot=0)])[0])

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = []
        for r in requests:
            self._trees[r.slot] = r
            key = "verify", tuple(self._tokens[r.slot]), r.tree.token_ids.tobytes(), r.tree.parents.tobytes()
            verdicts.append(self._ask(key, partial(self._verify, r)))
        return verdicts

    def _verify(self, request: VerifyRequest) -> Verdict:
        self._bring(self._tokens[request.slot])
        return copied(self._engine.verify([replace(request, slot=0)])[0])

    def commit(self, slot: int, path: Any, *, taps: bool) -> None:
        self._tokens[slot] += self._trees[slot].tree.token_ids[path].tolist()

    def close(self) -> None:
        pass

    def _ask(self, key: Any, ask: Callable[[], Any]) -> Any:
        if key not in self._said:
            self._said[key] = ask()
        return self._said[key]

    def _bring(self, tokens: list[int]) -> Verdict:
        """Fill the real slot with the tokens, the last one anew: so there is a state the drafter has not seen."""
        same = next((i for i, (a, b) in enumerate(zip(self._held, tokens, strict=False)) if a != b), len(self._held))
        same = min(same, len(tokens) - 1)
        self._engine.truncate(0, same)
        self._held = list(tokens)
        return copied(self._engine.prefill(0, np.array(tokens[same:], np.int64), rows="last", taps=True))


def copied(verdict: Verdict) -> Verdict:
    return Verdict(verdict.choices.copy(), np.array(verdict.logits))


def uncertain(llm: LLM, prompts: list[Any]) -> list[int]:
    """The prompt whose first token the target is least sure of."""
    choices = [llm.codec.encode(prompt) for prompt in prompts]
    engine = Remembering(llm.engine, lambda draft: draft)

    def entropy(ids: list[int]) -> float:
        p = first_row(engine, ids)
        return float(-(p * np.log(np.maximum(p, 1e-30))).sum())

    return max(choices, key=entropy)


def first_row(engine: Remembering, tokens: list[int]) -> np.ndarray:
    """float64 [V]: the distribution of what follows."""
    engine.truncate(0, 0)
    x = engine.prefill(0, np.array(tokens), rows="last", taps=True).logits[-1].astype(np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def likely(engine: Remembering, prompt: list[int], floor: float, depth: int = 3) -> dict[tuple[int, ...], float]:
    """Every beginning of `depth` tokens at least as probable as `floor`, with its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, p in found.items():
            row = p * first_row(engine, [*prompt, *tokens])
            longer |= {(*tokens, int(t)): float(row[t]) for t in np.flatnonzero(row >= floor)}
        found = longer
    return found


def assert_distributed(
    engine: Engine, prompt: list[int], expected: dict[tuple[int, ...], float], **method: Any
) -> None:
    """Draw SEEDS times; beginnings that are not `expected` one by one count as one."""
    scheduler = Scheduler(engine)
    counts: Counter[tuple[int, ...]] = Counter()
    slots = scheduler.slots
    for start in range(0, SEEDS, slots):
        completions = []
        for seed in range(start, start + slots):
            params = SamplingParams(temperature=1, max_tokens=3, seed=seed, ignore_eos=True, **method)
            completions.append(completion(engine, prompt, params))
        finish(scheduler, completions)
        counts.update(tuple(c.output) for c in completions)
    rest: tuple[int, ...] = ()
    for outcome in list(counts):
        if outcome not in expected:
            counts[rest] += counts.pop(outcome)
    wanted = {**expected, rest: 1 - sum(expected.values())}
    assert len(expected) > 10, "a distribution worth testing"
    assert chi_square(counts, wanted) > FALSE_ALARM


DRAWN: dict[str, dict[str, Any]] = {
    "ddtree": {"method": "ddtree", "tree_budget": 16},
    "dflash-sample": {"method": "dflash-sample", "tree_budget": 3},
}


@pytest.mark.parametrize("drafter", CHANGES)
@pytest.mark.parametrize("method", DRAWN)
def test_first_tokens_are_distributed_as_the_targets(llm: LLM, prompts: list[Any], method: str, drafter: str) -> None:
    engine = Remembering(llm.engine, CHANGES[drafter])
    prompt = uncertain(llm, prompts[:20])
    expected = likely(engine, prompt, 5 / SEEDS)
    assert_distributed(engine, prompt, expected, **DRAWN[method])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafter", CHANGES)
@pytest.mark.parametrize("method", DRAWN)
def test_first_tokens_drawn_anew_are_distributed_as_the_targets(
    llm: LLM, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, method: str, drafter: str
) -> None:
    prompt = uncertain(llm, prompts[:20])
    expected = likely(Remembering(llm.engine, CHANGES["good"]), prompt, 5 / SEEDS)
    draft = llm.engine.draft
    monkeypatch.setattr(llm.engine, "draft", lambda requests: [CHANGES[drafter](d) for d in draft(requests)])
    assert_distributed(llm.engine, prompt, expected, **DRAWN[method])
