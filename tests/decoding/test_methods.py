"""The table of methods, and which requests decode in rounds on the device: a list of fields it honours, and everything
else at its default."""

import dataclasses
from typing import Any

import pytest
from drafts import marginals
from scripted import ScriptedEngine, generate, make_manifest
from scripted_models import Good, MarkovTarget

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.check.run import engine_cases
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import BASELINES, DFLASH, METHODS, Proposal, resolve_method
from ddtree_trt.runtime.decoding.routing import request_host_reason
from ddtree_trt.runtime.engines.base import Draft
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import chain


@pytest.mark.parametrize(("kind", "best"), [("dflash", "ddtree"), ("autoregressive", "draft-model")])
def test_auto_is_the_first_method_the_drafter_is_for(kind: str, best: str) -> None:
    assert resolve_method("auto", kind).name == best
    assert resolve_method("ar", kind).name == "ar"


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("draft-model", "dflash", "of kind autoregressive, .* dflash; it can do ar, dflash, ddtree, dflash-sample$"),
        ("ddtree", "autoregressive", "of kind dflash, .* autoregressive; it can do ar, draft-model$"),
    ],
)
def test_a_method_the_drafter_cannot_serve_is_refused(method: str, kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"method '{method}' needs a drafter {message}"):
        resolve_method(method, kind)


def test_automatic_budgets_without_costs_are_the_whole_draft() -> None:
    block = make_manifest(6, "dflash", 16, Limits()).drafting
    assert {name: method.default_budget(block) for name, method in METHODS.items()} == {
        "ddtree": None,
        "dflash": 15,
        "ar": 0,
        "dflash-sample": 15,
        "draft-model": None,
        "eagle": None,
    }


def test_a_method_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters take it, rounds decode by it, `check` and `bench` measure it."""
    asked: list[int] = []

    def first_two(draft: Draft, budget: int, draw: Any) -> Proposal:
        asked.append(budget)
        return Proposal(chain(marginals(draft).token_ids[:2, 0]))

    monkeypatch.setitem(METHODS, "pairs", dataclasses.replace(DFLASH, name="pairs", propose=first_two))
    target = MarkovTarget()
    outputs = [
        generate(ScriptedEngine(target, Good(target)), [1, 2], SamplingParams(max_tokens=20, method=method))
        for method in ("pairs", "ar")
    ]
    assert outputs[0] == outputs[1] and set(asked) == {3}
    with pytest.raises(UsageError, match=r"or one of ddtree, .*, pairs, not 'pears'"):
        SamplingParams(method="pears")
    assert "pairs" in [case.label for case in engine_cases(make_manifest(6, "dflash", 4, Limits()), ("auto",))]
    cases = BenchSettings("engine", methods=("pairs",)).cases("dflash")
    assert [case.label for case in cases] == [*(method.name for method in BASELINES), "pairs"]


# A value other than the default for every field, and whether the device honours it: always, for greedy requests only
# (a filter of draws does nothing there), or never.
FIELDS: dict[str, tuple[Any, str]] = {
    "n": (3, "always"),
    "max_tokens": (7, "always"),
    "min_tokens": (2, "never"),
    "temperature": (0.7, "always"),
    "top_k": (5, "greedy"),
    "top_p": (0.5, "greedy"),
    "min_p": (0.1, "greedy"),
    "seed": (1, "always"),
    "stop": ("end", "always"),
    "stop_token_ids": ((3,), "always"),
    "include_stop_str_in_output": (True, "always"),
    "ignore_eos": (True, "always"),
    "logprobs": (0, "never"),
    "prompt_logprobs": (0, "always"),
    "repetition_penalty": (1.1, "never"),
    "presence_penalty": (0.5, "never"),
    "frequency_penalty": (-0.5, "never"),
    "logit_bias": ({3: 1.0}, "never"),
    "echo": (True, "always"),
    "skip_reading_prefix_cache": (True, "always"),
    "skip_special_tokens": (False, "always"),
    "method": ("ddtree", "always"),
    "tree_budget": (16, "always"),
    "structured": ({"regex": "a+"}, "never"),
    "keep_special_tokens": ((3,), "always"),
}


@pytest.fixture
def engine() -> ScriptedEngine:
    """As if it had device rounds, and a GPU."""
    target = MarkovTarget()
    scripted = ScriptedEngine(target, Good(target))
    scripted.manifest = dataclasses.replace(scripted.manifest, backend="torch")
    rounds = type("Rounds", (), {"by_default": True})()
    scripted.rounds = rounds
    return scripted


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_honoured_or_refused_by_name(engine: ScriptedEngine, name: str, temperature: float) -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingParams)}
    value, honoured = FIELDS[name]
    options = {"method": "ddtree", "tree_budget": 16, "temperature": temperature}
    params = SamplingParams(**{**options, name: value})
    why = request_host_reason("auto", engine, params)
    if honoured == "always" or (honoured == "greedy" and not params.stochastic):
        assert why is None
        return
    expected = f"{name} works on logits, which stay on the device"
    assert why == expected
    with pytest.raises(UsageError, match=f"device_rounds is on, but {expected}; use auto or off"):
        request_host_reason("on", engine, params)
