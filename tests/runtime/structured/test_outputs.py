"""Outputs under constraints: every one satisfies its constraint, and no method changes a token of it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.record import StructuredOutput

PROMPT = [{"role": "user", "content": "There are 6 drawers, each with 32 cards. How many cards are there?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def outputs(llm: LLM, structured: StructuredOutput, **params: Any) -> list[CompletionOutput]:
    given = SamplingParams(**{"max_tokens": 300, "seed": 3, "structured": structured, **params})
    return llm.generate([PROMPT], given)[0].outputs


TAG = {"begin": "<call>\n", "schema": SCHEMA, "end": "\n</call>"}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{2,5} cards\\."}, "[0-9]{2,5} cards\\."),
    ({"choice": ["many cards", "few", "fewer", 'né\n"q"']}, 'many cards|few|fewer|né\n"q"'),
    ({"grammar": 'start: "<" word ("," word){1,2} ">"\nword: /[a-f]{1,3}/'}, "<[a-f]{1,3}(,[a-f]{1,3}){1,2}>"),
    ({"grammar": 'root ::= ("x" | "yy") [0-9] [0-9]?'}, "(x|yy)[0-9]{1,2}"),
    ({"tags": [TAG], "at_most": 1}, "<call>\n{[^<]*}\n</call>"),
    ({"tags": [TAG], "at_least": 2, "at_most": 2, "separator": "\n"}, "(<call>\n{[^<]*}\n</call>\n?){2}"),
    ({"regex": "[a-f]{3,6}!", "after": "Answer"}, "(?s:.*)Answer[a-f]{3,6}!"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("fields", "expression"), FORMS, ids=[expression[:20] for _, expression in FORMS])
def test_every_form(llm: LLM, fields: dict[str, Any], expression: str, temperature: float) -> None:
    structured = StructuredOutput.from_mapping(fields)
    (expected,) = outputs(llm, structured, method="ar", temperature=temperature)
    (found,) = outputs(llm, structured, method="ddtree", tree_budget=8, temperature=temperature)
    assert found.token_ids == expected.token_ids and found.finish_reason == "stop"
    assert re.fullmatch(expression, found.text), found.text
    if "tags" in fields:
        for call in found.text.removesuffix("</call>").split("</call>"):
            jsonschema.validate(json.loads(call.partition("<call>")[2]), SCHEMA)


def test_every_choice_is_reached(llm: LLM) -> None:
    choices = ("a cat", "a car", "a", "dog", "12")
    found = outputs(llm, StructuredOutput(choice=choices), temperature=5.0, n=64, method="ddtree", tree_budget=4)
    assert {output.text for output in found} == set(choices)


def test_log_probabilities_are_the_targets_own(llm: LLM) -> None:
    (found,) = outputs(llm, StructuredOutput(choice=("few", "many")), logprobs=2)
    (free,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=2))[0].outputs
    assert found.logprobs and free.logprobs
    assert found.logprobs[0].top == free.logprobs[0].top
    assert found.logprobs[0].rank > 1 and found.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_stop_string_and_a_limit_cut_the_output(llm: LLM) -> None:
    structured = StructuredOutput(regex="abcdefabcdef")
    (whole,) = outputs(llm, structured)
    (stopped,) = outputs(llm, structured, stop=["fab"])
    (short,) = outputs(llm, structured, max_tokens=2)
    assert (whole.text, stopped.text, stopped.stop_reason) == ("abcdefabcdef", "abcde", "fab")
    assert short.finish_reason == "length" and whole.text.startswith(short.text)


def test_the_end_of_the_text_comes_before_other_limits(llm: LLM) -> None:
    (found,) = outputs(llm, StructuredOutput(regex="ab"), min_tokens=20, ignore_eos=True)
    assert (found.text, found.finish_reason) == ("ab", "stop")
    (longer,) = outputs(llm, StructuredOutput(regex="a*"), min_tokens=5, max_tokens=40)
    assert set(longer.text) == {"a"} and len(longer.token_ids) >= 5


HOSTILE = [
    {"regex": "(a{1,1000}){1,1000}{1,1000}"},
    {"regex": "(" * 5000 + ")" * 5000},
    {"json_schema": {"type": "array", "items": {"enum": [f"{i}" * 20 for i in range(2000)]}, "maxItems": 10**9}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json_schema": {"type": "string", "minLength": 10**18}},
    {"json_schema": {"type": "string", "pattern": "^(.*a){200}$"}},
    {"json_schema": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(12)]}},
    {"json_schema": '{"items":' * 900 + "{}" + "}" * 900},
    {"grammar": "start: start start | start |"},
    {"grammar": "start: a\n" + "\n".join(f"a{'x' * i}: a{'x' * (i + 1)} a{'x' * (i + 1)}" for i in range(40))},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: str(fields)[:50])
def test_hostile_constraints_end_in_a_sentence_or_an_output(llm: LLM, fields: dict[str, Any]) -> None:
    try:
        found = outputs(llm, StructuredOutput.from_mapping(fields), max_tokens=8, method="ddtree", tree_budget=4)
    except UsageError as error:
        assert str(error).startswith("structured") and "\n" not in str(error)
    else:
        assert found[0].finish_reason in ("length", "stop")
    (free,) = llm.generate([PROMPT], SamplingParams(max_tokens=2))[0].outputs
    assert len(free.token_ids) == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "("}, 'at 1(8): invalid regex "(" (in regex): regex parse error: error: unclosed group'),
        ({"grammar": "start: foo"}, 'at 1(8): unknown name: "foo"'),
        ({"grammar": 'start: "a" | b\nb: ^'}, "2(4): lexer error"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "regex parse error: error: unclosed group"),
    ],
)
def test_a_reason_of_the_library_is_one_line_without_quotations(llm: LLM, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as error:
        outputs(llm, StructuredOutput(**fields))
    assert str(error.value).endswith(f" cannot be used: {reason}")
