"""Equal seeds, equal tokens, on real engines: backend × precision × drafter × method × budget, beside `ar` alone.

An exact engine has the very bits of `ar`: tokens, text and log-probabilities. In another the first difference must be
a tie within rounding: two tokens whose logit/temperature + noise lie that near each other, or one that lies as near to
the border of a filter. `pytest -m slow tests/decoding/lossless/test_lossless_engines.py` makes many requests; how many
differ is printed with -s.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from drafts import LIES, with_lies
from engine_builds import CHATS

from ddtree_trt import _native
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.runtime.decoding.noise import Noise
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

ENGINES = {"fp32": ("onnxruntime", "fp32"), "int8": ("onnxruntime", "int8"), "torch": ("torch", "fp32")}
# Of each kind of drafter its methods, with budgets.
GRID: dict[str, list[tuple[str, list[Any]]]] = {
    "dflash": [("ddtree", [1, 4, 16, 64, 256, "auto"]), ("dflash", [3, "auto"]), ("dflash-sample", ["auto"])],
    "hybrid": [("ddtree", [4, 64, "auto"]), ("dflash", [3, "auto"]), ("dflash-sample", ["auto"])],
    "dspark": [("ddtree", [4, 64, "auto"]), ("dflash", ["auto"]), ("dflash-sample", ["auto"])],
    "eagle3": [("eagle", [2, 40, "auto"])],
    "autoregressive": [("draft-model", [1, 7, "auto"])],
}
# What `ar` said, by engine, prompt and parameters. A closed engine's number may be another's later.
ALONE: WeakKeyDictionary[LLM, dict[Any, Any]] = WeakKeyDictionary()
ALLOWED = 0.005  # share of an inexact engine's requests that may differ, all of them by ties


CELLS = [(kind, name) for kind in GRID for name in ENGINES if (kind, name) != ("hybrid", "int8")]  # which is refused


@pytest.fixture(scope="module", params=CELLS, ids="-".join)
def opened(request: pytest.FixtureRequest, built: Any) -> Iterator[tuple[str, LLM]]:
    kind, name = request.param
    with LLM(built(kind, *ENGINES[name]), threads=1) as llm:
        yield kind, llm


class Tie:
    """How near a difference is to a tie, by the target's row behind the tokens both outputs have."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams, index: int, common: Sequence[int]) -> None:
        manifest = llm.engine.manifest
        stops = set() if params.ignore_eos else set(manifest.stop_token_ids)
        sampler = Sampler(params, manifest.target_dims.vocab_size, prompt, frozenset(stops), index)
        sampler.observe(common)
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


def differences(llm: LLM, asked: Sequence[Any], params: Sequence[SamplingParams], found: Sequence[Any]) -> list[str]:
    """Of each completion that is not that of `ar` alone how far it is from a tie, which must be within rounding."""
    ties: list[str] = []
    for prompt, p, output in zip(asked, params, found, strict=True):
        alone = SamplingParams(**{**vars(p), "method": "ar", "tree_budget": "auto"})
        said, key = ALONE.setdefault(llm, {}), (str(prompt), str(alone))
        if key not in said:
            said[key] = llm.generate(prompt, alone)[0]
        expected = said[key]
        for a, b in zip(expected.outputs, output.outputs, strict=True):
            if llm.engine.inexact is None:
                assert a == b, f"{p}: not that of ar in an exact engine"
            if a.token_ids == b.token_ids:
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
                continue
            pairs = list(zip(a.token_ids, b.token_ids, strict=False))
            place = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
            assert place is not None, f"{p}: one output is the beginning of the other"
            tie = Tie(llm, output.prompt_token_ids, p, a.index, a.token_ids[:place])
            gap = tie.gap(*pairs[place])
            ties.append(f"{p.method} at {p.temperature}, token {place}: {gap:.2g} apart")
            assert gap <= 2 * tie.rounding, f"{p}: {ties[-1]}, the precision rounds by {tie.rounding:.2g}"
    return ties


@pytest.mark.parametrize("lies", LIES)
def test_every_method_and_budget_gives_the_tokens_of_ar(
    opened: tuple[str, LLM], monkeypatch: pytest.MonkeyPatch, lies: str
) -> None:
    """Whatever is drafted; greedy answers side by side."""
    kind, llm = opened
    tokens, wrong, count = 24, list[str](), 2 if lies == "none" else 1
    draft, vocab = llm.engine.draft, llm.engine.manifest.target_dims.vocab_size
    monkeypatch.setattr(llm.engine, "draft", lambda asked: [with_lies(each, lies, vocab) for each in draft(asked)])
    for place, (method, budget) in enumerate((m, b) for m, budgets in GRID[kind] for b in budgets):
        if budget == 256 and lies != "none":
            continue
        asked = CHATS[7 * (place % 3) :: 40][:count]
        params = SamplingParams(method=method, tree_budget=budget, max_tokens=tokens, ignore_eos=True, logprobs=1)
        found = llm.generate(asked, params)
        wrong += differences(llm, asked, [params] * len(asked), found)
        accepted = sum(output.metrics.accepted_tokens for output in found)
        if lies == "none" and (budget != "auto" or "dflash" in method):  # by its costs, auto may well not draft
            assert accepted > 0.2 * tokens * len(asked), f"{method}: the drafter should be of use here"
        elif lies == "all":
            assert accepted < 0.2 * tokens * len(asked)
    assert len(wrong) <= 1


def random_params(rng: np.random.Generator, kind: str, vocab: int, exact: bool) -> SamplingParams:
    """A request of any kind whose tokens should be those of `ar`."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    draws = ("dflash-sample", "draft-model")
    method, budgets = GRID[kind][int(rng.integers(len(GRID[kind])))]
    temperature = 0.0 if method in draws else float(rng.choice([0.0, 0.4, 0.8, 1.0, 1.5]))
    max_tokens = int(rng.integers(5, 60))
    bias = {int(t): float(rng.normal(0, 3)) for t in rng.integers(0, vocab, 4)}
    return SamplingParams(
        method=method,
        tree_budget=budgets[int(rng.integers(len(budgets)))],
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
        structured=sometimes(0.25, {"regex": r"[A-Z][a-z ]{3,30}(\d{1,4}[.,] ?)*(is|are)[^x]{2,50}"}, None)
        if exact
        else None,
    )


def check_random(opened: tuple[str, LLM], count: int, seed: int, **options: Any) -> None:
    """Requests of several kinds side by side, more than there are slots, on prompts of up to several chunks."""
    (kind, llm), rng, made, wrong = opened, np.random.default_rng(seed), 0, list[str]()
    vocab = llm.engine.manifest.target_dims.vocab_size
    while made < count:
        asked = [CHATS[i] for i in rng.integers(0, len(CHATS), rng.integers(1, 6))]
        if rng.random() < 0.3:
            asked[0] = rng.integers(5, vocab, 300).tolist()
        params = [
            dataclasses.replace(random_params(rng, kind, vocab, llm.engine.inexact is None), **options) for _ in asked
        ]
        wrong += differences(llm, asked, params, llm.generate(asked, params))
        made += sum(p.n for p in params)
    print(f"\n{len(wrong)} of {made} completions are not those of ar\n" + "\n".join(wrong))
    assert len(wrong) <= 1 + ALLOWED * made


def test_random_requests_give_the_tokens_of_ar(opened: tuple[str, LLM]) -> None:
    check_random(opened, 8, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_requests_give_the_tokens_of_ar(opened: tuple[str, LLM]) -> None:
    check_random(opened, 400, seed=2)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["any", "top_p"])
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_a_difference_that_is_no_tie_is_found(
    built: Any, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Noise that does not belong to the seed fails at once, also where filters leave much to rounding."""
    made = Noise.__init__
    monkeypatch.setattr(Noise, "__init__", lambda self, seed, index: made(self, None, index))
    found = r"apart, .* rounds by|a token was drawn that the filters leave out|not that of ar in an exact engine"
    directory = built("dflash", *ENGINES[name])
    with LLM(directory, threads=1) as llm, pytest.raises(AssertionError, match=found):
        check_random(("dflash", llm), 40, seed=1, method="ddtree", **options)
