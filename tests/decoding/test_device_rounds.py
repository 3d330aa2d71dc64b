"""Which requests decode in rounds on the device: a list of fields it honours, and everything else at its default."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scripted import ScriptedEngine
from scripted_models import Good, MarkovTarget

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.routing import why_host
from ddtree_trt.runtime.params import SamplingParams

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
    "skip_special_tokens": (False, "always"),
    "method": ("ddtree", "always"),
    "tree_budget": (16, "always"),
}


@pytest.fixture
def engine() -> ScriptedEngine:
    """As if it had device rounds, and a GPU."""
    target = MarkovTarget()
    scripted = ScriptedEngine(target, Good(target))
    scripted.manifest = dataclasses.replace(scripted.manifest, backend="torch")
    rounds = type("Rounds", (), {"by_default": True})()
    scripted.rounds = rounds  # type: ignore[assignment]
    return scripted


def test_every_field_has_a_case() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_honoured_or_refused_by_name(engine: ScriptedEngine, name: str, temperature: float) -> None:
    value, honoured = FIELDS[name]
    options = {"method": "ddtree", "tree_budget": 16, "temperature": temperature}
    params = SamplingParams(**{**options, name: value})
    why = why_host("auto", engine, params)
    if honoured == "always" or (honoured == "greedy" and not params.stochastic):
        assert why is None
        return
    assert why == f"{name} works on logits, which stay on the device"
    with pytest.raises(UsageError, match=f"device_rounds is on, but {name} works on logits"):
        why_host("on", engine, params)


def test_a_field_nobody_listed_is_the_hosts(engine: ScriptedEngine) -> None:
    """A parameter added to SamplingParams is refused by the device until somebody says that it honours it."""

    @dataclasses.dataclass(frozen=True)
    class Wider(SamplingParams):
        typical_p: float = 1.0
        grammar: str | None = None

    options: dict[str, Any] = {"method": "ddtree", "tree_budget": 16}
    assert why_host("auto", engine, Wider(**options)) is None
    assert why_host("auto", engine, Wider(**options, typical_p=0.9)) == (
        "typical_p works on logits, which stay on the device"
    )
    assert why_host("auto", engine, Wider(**options, typical_p=0.9, grammar="x", logprobs=1)) == (
        "logprobs, typical_p, grammar work on logits, which stay on the device"
    )
