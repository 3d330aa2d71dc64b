"""Equal seeds, equal tokens: random requests by every method that samples from the target, in batches of all kinds,
beside `ar` alone with the same seed.

An int8 engine is exact: no request differs. In fp32 the first difference must be a tie within rounding: two tokens
whose logit/temperature + noise lie that near each other, or one that lies as near to the border of a filter.
`pytest -m slow tests/decoding/lossless/test_equal_seeds.py` does many; how many differ is printed with -s.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_builds import PACKAGED

from ddtree_trt import _native
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.decoding.noise import Noise
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

SLOTS = 4
ALLOWED = 0.005  # share of an fp32 engine's requests that may differ, all of them by ties


@pytest.fixture(scope="module", params=["fp32", "int8"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeds") / request.param
    limits: dict[str, Any] = {"max_seq_len": 512, "max_batch": SLOTS, "max_tree_budget": 64}
    compile_engine(BuildRequest(target="tiny", output=path, precision=request.param, **limits))
    return path


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    rows = (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(row)["prompt"]}] for row in rows]


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """A request of any kind whose tokens should be those of `ar`."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    temperature = float(rng.choice([0.0, 0.4, 0.8, 1.0, 1.5]))
    methods = ["ddtree", "ddtree", "dflash", *(["dflash-sample"] if temperature == 0 else [])]
    method, max_tokens = str(rng.choice(methods)), int(rng.integers(5, 80))
    budget = sometimes(0.2, "auto", int(rng.choice([1, 3, 8, 16, 40] if method == "ddtree" else [1, 4, 15])))
    bias = {int(t): float(rng.normal(0, 3)) for t in rng.integers(0, vocab, 4)}
    return SamplingParams(
        method=method,
        tree_budget=budget,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=int(rng.integers(0, 2**32)),
        n=int(rng.choice([1, 1, 1, 2])),
        top_k=sometimes(0.25, int(rng.integers(1, 60)), 0),
        top_p=sometimes(0.25, float(rng.uniform(0.3, 1)), 1.0),
        min_p=sometimes(0.15, float(rng.uniform(0.01, 0.2)), 0.0),
        repetition_penalty=sometimes(0.2, float(rng.uniform(0.9, 1.4)), 1.0),
        presence_penalty=sometimes(0.2, float(rng.uniform(-0.5, 1)), 0.0),
        frequency_penalty=sometimes(0.2, float(rng.uniform(-0.2, 0.5)), 0.0),
        logit_bias=sometimes(0.2, bias, {}),
        min_tokens=sometimes(0.2, int(rng.integers(0, max_tokens + 1)), 0),
        ignore_eos=sometimes(0.3, True, False),
        stop=sometimes(0.2, (str(rng.choice(["12", " = ", ".\n", "total", "7"])),), ()),
    )


class Tie:
    """How near a difference is to a tie, by the target's row behind the tokens both outputs have."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams, index: int, common: Sequence[int]) -> None:
        manifest = llm.engine.manifest
        stops = set() if params.ignore_eos else set(manifest.stop_token_ids)
        sampler = Sampler(params, manifest.target_dims.vocab_size, prompt, frozenset(stops), index)
        for token in common:
            sampler.observe(token)
        raw = last_row(llm, [*prompt, *common])
        self.rounding = PRECISIONS[manifest.precision].relative_rounding * float(np.abs(raw).max())
        self.params, self.row = params, sampler._processed(raw).astype(np.float64)
        seed, position = sampler.noise.target_seed % 2**64, len(prompt) + len(common)
        self.values = self.row + params.temperature * _native.gumbel(seed, position, len(self.row))

    def gap(self, a: int, b: int) -> float:
        """Between two tokens, in logits; 0 where one may be left out by a filter and the other not."""
        inside = [self._inside(t) for t in (a, b)]
        assert None not in inside, "a token was drawn that the filters leave out"
        return 0.0 if not all(inside) else abs(float(self.values[a] - self.values[b]))

    def _inside(self, token: int) -> bool | None:
        """Whether the filters keep a token whatever is rounded; False where rounding decides, None if they do not."""
        params, x, r = self.params, self.row, 2 * self.rounding
        if params.temperature == 0:
            return True
        verdicts = []
        if 0 < params.top_k < len(x):
            verdicts.append(_verdict(x[token] - np.sort(x)[-params.top_k], r))
        weights = np.exp((x - x.max()) / params.temperature)
        if params.min_p > 0:
            verdicts.append(_verdict(x[token] - x.max() - params.temperature * math.log(params.min_p), r))
        if params.top_p < 1:
            others = np.arange(len(x)) != token  # those before it count, not its own weight
            least, most = (weights[others & (x > x[token] + shift)].sum() / weights.sum() for shift in (r, -r))
            odds = math.exp(min(r / params.temperature, 50))  # by which rounding may move those of a share
            least, most = least / (least + (1 - least) * odds), most * odds / (1 - most + most * odds)
            verdicts.append(None if least >= params.top_p else bool(most < params.top_p))
        return None if None in verdicts else all(verdicts)


def _verdict(margin: float, rounding: float) -> bool | None:
    return True if margin > rounding else False if margin >= -rounding else None


def last_row(llm: LLM, tokens: list[int]) -> np.ndarray:
    """float32 [V]: what follows the tokens."""
    engine, chunk = llm.engine, llm.engine.manifest.limits.prefill_chunk
    llm.reset_prefix_cache()
    for start in range(0, len(tokens), chunk):
        verdict = engine.prefill(0, np.array(tokens[start : start + chunk]), rows="last", taps=False)
    row = np.array(verdict.logits[-1])
    engine.truncate(0, 0)
    return row


def differing(llm: LLM, prompts: list[Any], count: int, seed: int, **options: Any) -> tuple[int, list[str]]:
    """Completions made, and of each that is not that of `ar` how far it is from a tie. `options`: of every request."""
    rng, made, found = np.random.default_rng(seed), 0, []
    vocab, precision = llm.engine.manifest.target_dims.vocab_size, llm.engine.manifest.precision
    while made < count:
        chosen = [prompts[i] for i in rng.integers(0, len(prompts), rng.integers(1, SLOTS + 2))]
        params = [dataclasses.replace(random_params(rng, vocab), **options) for _ in chosen]
        together = llm.generate(chosen, params)
        for prompt, p, output in zip(chosen, params, together, strict=True):
            alone = SamplingParams(**{**vars(p), "method": "ar", "tree_budget": "auto"})
            (expected,) = llm.generate(prompt, alone)
            for a, b in zip(expected.outputs, output.outputs, strict=True):
                made += 1
                if a.token_ids == b.token_ids:
                    assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
                    continue
                pairs = list(zip(a.token_ids, b.token_ids, strict=False))
                place = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
                assert place is not None, f"{p}: one output is the beginning of the other"
                assert llm.engine.lookahead is None, f"{p}: token {place} is not that of ar in an exact engine"
                tie = Tie(llm, output.prompt_token_ids, p, a.index, a.token_ids[:place])
                gap = tie.gap(*pairs[place])
                found.append(f"{p.method} at {p.temperature}, token {place}: {gap:.2g} apart")
                assert gap <= 2 * tie.rounding, f"{p}: {found[-1]}, {precision} rounds by {tie.rounding:.2g}"
    return made, found


def assert_equal(llm: LLM, prompts: list[Any], count: int, seed: int, **options: Any) -> None:
    made, found = differing(llm, prompts, count, seed, **options)
    precision = llm.engine.manifest.precision
    print(f"\n{precision}: {len(found)} of {made} completions are not those of ar\n" + "\n".join(found))
    assert len(found) <= 1 + ALLOWED * made


def test_random_requests_give_the_tokens_of_ar(directory: Path, prompts: list[Any]) -> None:
    with LLM(directory, threads=1) as llm:
        assert_equal(llm, prompts, 40, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_requests_give_the_tokens_of_ar(directory: Path, prompts: list[Any]) -> None:
    with LLM(directory, threads=1) as llm:
        assert_equal(llm, prompts, 1200 if llm.engine.manifest.precision == "fp32" else 400, seed=2)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["any", "top_p"])
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_difference_that_is_no_tie_is_found(
    directory: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    """Noise that does not belong to the seed fails at once, also where filters leave much to rounding."""
    made = Noise.__init__
    monkeypatch.setattr(Noise, "__init__", lambda self, seed, index: made(self, None, index))
    found = r"apart, .* rounds by|a token was drawn that the filters leave out|not that of ar in an exact engine"
    with LLM(directory, threads=1) as llm, pytest.raises(AssertionError, match=found):
        assert_equal(llm, prompts, 40, seed=1, method=method, **options)
