"""Compare the tokens and logits of every method, budget and batch with those of `ar`, bit for bit.

    python -m workbench equal-bits ENGINE_DIR --tokens 20000

Decodes every prompt by `ar` alone, then prompts in batches of random size, each with a random method and budget, until
so many tokens were compared. Every row of logits a token was chosen from is compared too. Prints the sums after each
batch, and exits with 1 where anything differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray

from ddtree_trt.bench.measure import load_prompts
from ddtree_trt.runtime import sequence
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from workbench.options import PROMPTS, Prompts

BUDGETS = (1, 5, 16, 64, 128, "auto")


@dataclass
class Sums:
    """What was compared with `ar`, and what of it differs."""

    tokens: int = 0
    other_tokens: int = 0
    other_rows: int = 0
    requests: int = 0
    rounds: int = 0

    @property
    def equal(self) -> bool:
        return not (self.other_tokens or self.other_rows)

    def add(self, expected: RequestOutput, found: RequestOutput) -> None:
        """Compare two completions of one length, made with `digest`."""
        a, b = expected.outputs[0], found.outputs[0]
        assert a.logprobs is not None and b.logprobs is not None and len(a.logprobs) == len(b.logprobs) > 0
        self.tokens += len(b.token_ids)
        self.other_tokens += sum(x != y for x, y in zip(a.token_ids, b.token_ids, strict=True))
        self.other_rows += sum(x.top != y.top for x, y in zip(a.logprobs, b.logprobs, strict=True))
        self.requests += 1
        self.rounds += found.metrics.rounds

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.tokens} tokens, {self.other_tokens} differ, {self.other_rows} rows of "
            f"logits differ; {self.tokens / max(self.rounds, 1):.2f} tokens a round"
        )


def digest(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """In the place of a token's log-probabilities, a digest of its whole row of logits as the only top token."""
    return TokenLogprob(token, 0.0, 1, ((int(sha256(logits.tobytes()).hexdigest(), 16), 0.0),))


def compare(llm: LLM, prompts: Sequence[Any], tokens: int, *, length: int, seed: int = 0) -> Iterator[Sums]:
    """The sums after each batch, until `tokens` were compared. `length`: tokens of a completion."""
    rng, sums = np.random.default_rng(seed), Sums()
    kind = llm.engine.manifest.drafter_kind
    methods = [m for m in METHODS.values() if m.drafts and m.serves(kind)]
    methods += [m for m in methods if m.branches] * 3
    common: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "logprobs": 0}
    expected: dict[int, RequestOutput] = {}
    with patch.object(sequence, "logprob", digest):
        while sums.tokens < tokens:
            chosen = rng.integers(0, len(prompts), rng.integers(1, 2 + llm.engine.manifest.limits.max_batch)).tolist()
            for i in set(chosen) - set(expected):
                expected[i] = llm.generate([prompts[i]], SamplingParams(method="ar", **common))[0]
            params = []
            for _ in chosen:
                method = methods[rng.integers(len(methods))]
                budget: Any = BUDGETS[rng.integers(len(BUDGETS))] if method.branches else "auto"
                params.append(SamplingParams(method=method.name, tree_budget=budget, **common))
            for i, found in zip(chosen, llm.generate([prompts[i] for i in chosen], params), strict=True):
                sums.add(expected[i], found)
            yield sums


def main(
    engine: Path,
    prompts: Prompts = PROMPTS,
    limit: Annotated[int, typer.Option(help="prompts, evenly spaced")] = 40,
    tokens: int = 20_000,
    length: Annotated[int, typer.Option(help="tokens of a completion")] = 128,
    seed: int = 0,
    threads: int = 0,
) -> None:
    openings = [prompt.opening for prompt in load_prompts(prompts, limit)]
    with LLM(engine, threads=threads) as llm:
        for sums in compare(llm, openings, tokens, length=length, seed=seed):
            print(sums, flush=True)
    raise SystemExit(not sums.equal)
