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
from ddtree_trt.runtime.params import PARAMETERS, Parameter, SamplingParams
from ddtree_trt.runtime.structured.record import StructuredOutput
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


# Fields that the device honours in greedy requests only, where a filter of draws does nothing, and those it never does.
GREEDY = {"top_k", "top_p", "min_p"}
NEVER = {"min_tokens", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
NEVER |= {"structured"}
# A value other than the default, by the type of the field's values.
ANOTHER: dict[Any, Any] = {
    int: 16, float: 0.7, str: "ddtree", tuple[str, ...]: "end", tuple[int, ...]: (3,), dict[int, float]: {3: 1.0},
    StructuredOutput: {"regex": "a+"},
}  # fmt: skip


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
@pytest.mark.parametrize("row", PARAMETERS.values(), ids=PARAMETERS)
def test_every_field_is_honoured_or_refused_by_name(engine: ScriptedEngine, row: Parameter, temperature: float) -> None:
    value = not row.default if row.type is bool else ANOTHER[row.type]
    options: dict[str, Any] = {"method": "ddtree", "tree_budget": 16, "temperature": temperature, row.name: value}
    params = SamplingParams(**options)
    why = request_host_reason("auto", engine, params)
    if row.name not in NEVER and (row.name not in GREEDY or not params.stochastic):
        assert why is None
        return
    assert why == f"{row.name} works on logits, which stay on the device"
    with pytest.raises(UsageError, match=f"device_rounds is on, but {why}; use auto or off"):
        request_host_reason("on", engine, params)
