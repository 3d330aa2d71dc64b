"""What device rounds draw: the targets' own distribution, and the same tokens as the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch_rounds import greedy, rounds_of
from truth import FALSE_ALARM, chi_square

from ddtree_trt.check.uniformity import place_in_distribution, uniformity
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import RoundRequest
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

SEEDS = 500


# At a temperature


def test_one_seed_gives_one_text(device: LLM, prompts: list[Any]) -> None:
    """Whatever the budget, alone or beside others: behind the first token the rounds' own draws."""
    texts = {}
    for seed, budget in ((1, 2), (1, 16), (2, 16)):
        params = greedy(budget, temperature=3.0, seed=seed, max_tokens=24, ignore_eos=True)
        outputs = device.generate(prompts[:3], params)
        assert device.generate(prompts[1], params)[0].outputs == outputs[1].outputs
        texts[seed, budget] = [o.outputs[0].token_ids for o in outputs]
    assert texts[1, 2] == texts[1, 16] != texts[2, 16]
    engine, rounds = device.engine, rounds_of(device)
    prompt = device.codec.encode(prompts[0])
    engine.truncate(0, 0)
    engine.prefill(0, np.array(prompt), rows="none", taps=True)
    said = texts[1, 16][0][:1]
    seed = Sampler(SamplingParams(seed=1), 8, [], frozenset()).noise.target_seed
    while len(said) < 24:
        said += rounds.round([RoundRequest(0, said[-1], 16, 3.0, seed)])[0].tokens
    device.reset_prefix_cache()
    assert said[:24] == texts[1, 16][0]


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_device_and_host_draw_the_same_tokens(device: LLM, host: LLM, prompts: list[Any], temperature: float) -> None:
    """One rule: with one seed, rounds on the device, by stages and without drafts give one text."""
    params = greedy(16, temperature=temperature, seed=1, max_tokens=24, n=2)
    alone = SamplingParams(**{**vars(params), "method": "ar", "tree_budget": "auto"})
    found = [llm.generate(prompts[:3], p) for llm, p in ((device, params), (host, params), (host, alone))]
    tokens = [[c.token_ids for output in outputs for c in output.outputs] for outputs in found]
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(output.metrics.on_device for output in found[0])


def test_completions_of_one_prompt_differ(device: LLM) -> None:
    outputs = device.generate("Once", greedy(8, n=4, temperature=4.0, seed=3, max_tokens=12, ignore_eos=True))[0]
    assert len({o.text for o in outputs.outputs}) == 4
    assert outputs.metrics.on_device


def test_rounds_draw_from_the_targets_distribution(
    device: LLM, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens, of one round or of two, beside their exact joint distribution."""
    monkeypatch.setattr(
        "ddtree_trt.runtime.engines.torch.rounds.AHEAD", 1
    )  # a third of the rounds would be for nothing
    engine, rounds, temperature = device.engine, rounds_of(device), 1.0
    prompt = device.codec.encode(prompts[2])

    def probabilities(tokens: list[int]) -> np.ndarray:
        engine.truncate(0, 0)
        verdict = engine.prefill(0, np.array(tokens), rows="last", taps=True)
        x = np.asarray(verdict.logits[-1], np.float64) / temperature
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    def unsure(token: int) -> float:
        p = probabilities([*prompt, token])
        return -float((p * np.log(np.maximum(p, 1e-30))).sum())

    bonus = max(probabilities(prompt).argsort()[-80:].tolist(), key=unsure)  # hardly what the target would say
    first = probabilities([*prompt, bonus])
    expected: dict[tuple[int, ...], float] = {}
    for token in np.flatnonzero(first > 5 / SEEDS).tolist():
        second = probabilities([*prompt, bonus, token])
        expected |= {(token, int(t)): float(first[token] * second[t]) for t in np.flatnonzero(second > 0)}
    likely = {pair: p for pair, p in expected.items() if p > 5 / SEEDS}
    assert len(likely) > 10, "a distribution worth testing"
    probabilities(prompt)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(SEEDS):
        said = [bonus]
        while len(said) < 3:
            sampler = Sampler(SamplingParams(seed=seed), 8, [], frozenset())
            request = RoundRequest(0, said[-1], 8, temperature, sampler.noise.target_seed)
            said += rounds.round([request])[0].tokens
        pair = (said[1], said[2])
        counts[pair if pair in likely else ()] += 1
        engine.truncate(0, len(prompt))
    device.reset_prefix_cache()
    assert chi_square(counts, {**likely, (): 1 - sum(likely.values())}) > FALSE_ALARM


def test_every_token_of_long_texts_is_drawn_from_its_distribution(device: LLM, prompts: list[Any]) -> None:
    engine, rng, places = device.engine, np.random.default_rng(0), []
    for seed in range(4):
        params = greedy(16, temperature=2.0, seed=seed, max_tokens=60, ignore_eos=True)
        for prompt, output in zip(prompts[:3], device.generate(prompts[:3], params), strict=True):
            ids, tokens = device.codec.encode(prompt), output.outputs[0].token_ids
            engine.truncate(0, 0)
            whole = np.array([*ids, *tokens])
            logits = np.concatenate(
                [
                    np.asarray(engine.prefill(0, whole[i : i + 128], rows="all", taps=False).logits).copy()
                    for i in range(0, len(whole), 128)
                ]
            )
            device.reset_prefix_cache()
            for row, token in zip(logits[len(ids) - 1 :], tokens, strict=False):
                place = place_in_distribution(row, token, 2.0, rng)
                if place is not None:
                    places.append(place)
    test = uniformity(places)
    assert test.draws > 300 and test.p_value > FALSE_ALARM
