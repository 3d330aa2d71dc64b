"""SamplingParams: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.runtime.params import SamplingParams

INTEGER, NUMBER = "must be an integer", "must be a number"
NAN, INFINITE = float("nan"), float("inf")

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be from 1 to 64, not 0"),
    ({"n": 65}, "n must be from 1 to 64, not 65"),
    ({"n": True}, f"n {INTEGER} from 1 to 64, not True"),
    ({"n": 1.0}, f"n {INTEGER}"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ({"max_tokens": "5"}, f"max_tokens {INTEGER}"),
    ({"min_tokens": -1}, "min_tokens must be at least 0"),
    ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens (6) is above max_tokens (5)"),
    ({"temperature": -0.1}, "temperature must be from 0 to 100"),
    ({"temperature": 1e-320}, "temperature must be 0, for greedy decoding, or from 1e-30 to 100"),
    ({"temperature": 101}, "temperature must be from 0 to 100"),
    ({"temperature": NAN}, f"temperature {NUMBER}"),
    ({"temperature": INFINITE}, f"temperature {NUMBER}"),
    ({"temperature": None}, f"temperature {NUMBER}"),
    ({"top_k": -1}, "top_k must be at least 0"),
    ({"top_k": 2.5}, f"top_k {INTEGER}"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p must be from 0 to 1"),
    ({"top_p": NAN}, f"top_p {NUMBER}"),
    ({"min_p": -0.1}, "min_p must be from 0 to 1"),
    ({"min_p": 1.1}, "min_p must be from 0 to 1"),
    ({"seed": -1}, "seed must be from 0 to"),
    ({"seed": 2**64}, "seed must be from 0 to"),
    ({"seed": 0.5}, f"seed {INTEGER}"),
    ({"stop": ""}, "stop must hold strings that are not empty"),
    ({"stop": ["a", ""]}, "stop must hold strings that are not empty"),
    ({"stop": ["a", 1]}, "stop must hold strings"),
    ({"stop": ["a", "\ud800"]}, "stop is not valid Unicode: character 0 is half of a surrogate pair"),
    ({"stop": b"a"}, "stop must be one value or a list"),
    ({"stop": np.array(1.0)}, "stop must be one value or a list"),
    ({"stop": 1.5}, "stop must be one value or a list"),
    ({"stop": {"a": 1}}, "stop must be one value or a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must hold token ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must hold token ids"),
    ({"stop_token_ids": "12"}, "stop_token_ids must hold token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids must hold token ids"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false"),
    ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
    ({"echo": None}, "echo must be true or false"),
    ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache must be true or false"),
    ({"skip_special_tokens": 0}, "skip_special_tokens must be true or false"),
    ({"keep_special_tokens": ["x"]}, "keep_special_tokens must hold token ids"),
    ({"logprobs": 21}, "logprobs must be from 0 to 20"),
    ({"logprobs": True}, f"logprobs {INTEGER}"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 20"),
    ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100, not 0"),
    ({"repetition_penalty": -1}, "repetition_penalty must be from 0.01"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty must be from 0.01"),
    ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be from -2 to 2"),
    ({"logit_bias": [1, 2]}, "logit_bias must map token ids to biases"),
    ({"logit_bias": {"5": 1}}, "logit_bias: '5' is not a token id"),
    ({"logit_bias": {-5: 1}}, "logit_bias: -5 is not a token id"),
    ({"logit_bias": {5: 101}}, r"logit_bias[5] must be from -100 to 100"),
    ({"logit_bias": {5: INFINITE}}, rf"logit_bias[5] {NUMBER}"),
    (
        {"method": "magic"},
        "method must be auto or one of ddtree, dflash, ar, dflash-sample, draft-model, eagle, not 'magic'",
    ),
    ({"method": None}, "method must be auto or one of"),
    ({"tree_budget": -1}, 'tree_budget must be "auto" or an integer at least 0'),
    ({"tree_budget": "16"}, 'tree_budget must be "auto" or an integer at least 0'),
    ({"tree_budget": True}, 'tree_budget must be "auto" or an integer at least 0'),
    ({"tree_budget": None}, 'tree_budget must be "auto" or an integer at least 0'),
    ({"method": "ar", "tree_budget": 4}, "method 'ar' drafts nothing: tree_budget 4 cannot be honoured"),
    ({"method": "ar", "tree": "beam"}, "tree 'beam' needs a method that makes trees, ddtree or eagle; 'ar' makes none"),
    ({"method": "dflash", "tree": "eagle2"}, "'dflash' makes chains, whose length is draft_length or tree_budget"),
    ({"method": "dflash", "tree_width": 2}, "tree_width 2 needs a method that makes trees"),
    ({"method": "draft-model", "max_tree_depth": 2}, "max_tree_depth 2 needs a method that makes trees"),
    ({"method": "ar", "draft_length": 2}, "'ar' drafts nothing: draft_length cannot be honoured"),
    ({"tree": "chain", "tree_width": 2}, "tree 'chain' has one node at each depth: tree_width cannot be"),
    ({"tree": "best"}, "tree must be auto or one of heap, eagle2, beam, chain, not 'best'"),
    ({"tree_width": 0}, "tree_width must be at least 1"),
    ({"max_tree_depth": 0}, "max_tree_depth must be at least 1"),
    ({"draft_length": 0}, "draft_length must be at least 1"),
    ({"structured": "[]"}, "structured must be a StructuredOutput or an object of its fields, not []"),
]

ACCEPTED: list[dict[str, Any]] = [
    {"n": 64},
    {"max_tokens": 10**9},
    {"min_tokens": 5, "max_tokens": 5},
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 100},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"min_p": 1},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"logprobs": None, "prompt_logprobs": None, "seed": None},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {0: -100, 7: 100.0}},
    {"method": "ar", "tree_budget": 0},
    {"tree_budget": 0},
    *({"method": method} for method in METHODS),
]


@pytest.mark.parametrize(("values", "text"), REFUSED, ids=lambda v: str(v)[:50])
def test_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        SamplingParams(**values)


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_accepted(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("given", "kept"),
    [("x", ("x",)), (["x", "y"], ("x", "y")), (None, ()), (iter(["x"]), ("x",)), ((), ())],
)
def test_stop_is_one_string_or_many(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(("given", "kept"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_stop_token_ids_are_one_or_many(given: Any, kept: tuple[int, ...]) -> None:
    assert SamplingParams(stop_token_ids=given).stop_token_ids == kept


def test_every_field_is_named_in_a_test() -> None:
    tested = {name for values, _ in REFUSED for name in values}
    assert tested == {field.name for field in dataclasses.fields(SamplingParams)}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown sampling parameter beams, width; known are"):
        SamplingParams.from_mapping({"beams": 4, "width": 2, "temperature": 1})
    with pytest.raises(TypeError):
        SamplingParams(beams=2)  # type: ignore[call-arg]
    assert SamplingParams.from_mapping({"temperature": 1}) == SamplingParams(temperature=1)


def test_best_of_is_refused_with_what_to_use() -> None:
    for make in (SamplingParams, lambda **given: SamplingParams.from_mapping(given)):
        with pytest.raises(UsageError, match="best_of is not supported; ask for n completions with logprobs=0"):
            make(best_of=2)  # type: ignore[arg-type]
    params = SamplingParams(best_of=None, n=2)
    assert dataclasses.replace(params, n=3) == pickle.loads(pickle.dumps(SamplingParams(n=3)))


def test_the_callers_containers_may_change_later() -> None:
    stop, bias = ["x"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("y")
    bias[1] = 5.0
    assert (params.stop, params.logit_bias) == (("x",), {1: 2.0})
