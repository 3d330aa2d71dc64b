"""Constraints on the output over HTTP: OpenAI's and vLLM's names, with the real client, whole and streamed."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from serving import ThreadServer, events_of

PROMPT = "There are 6 drawers, each with 32 cards. How many cards are there?"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cards": {"type": "integer", "minimum": 0, "maximum": 999}, "unit": {"enum": ["card", "drawer"]}},
    "required": ["cards", "unit"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    unit: Literal["card", "drawer"]
    cards: int = Field(ge=0, le=999)


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def test_the_clients_own_parser_of_a_pydantic_model(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0.8, "seed": 3, "max_tokens": 300}
    answer = client.chat.completions.parse(**common, response_format=Answer).choices[0].message.parsed
    assert isinstance(answer, Answer)
    with client.chat.completions.stream(**common, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"guided_json": SCHEMA}, is_json),
        ({"guided_json": json.dumps(SCHEMA)}, is_json),
        ({"structured_outputs": {"json": SCHEMA}}, is_json),
        ({"guided_regex": "[0-9]{3} cards"}, re.compile("[0-9]{3} cards").fullmatch),
        ({"guided_choice": ["many", "few"]}, re.compile("many|few").fullmatch),
        ({"guided_grammar": 'root ::= "<" [a-f] [a-f] ">"'}, re.compile("<[a-f]{2}>").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-f]{2}/ ">"'}}, re.compile("<[a-f]{2}>").fullmatch),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_vllms_names_on_both_endpoints(client: openai.OpenAI, fields: dict[str, Any], check: Any) -> None:
    common: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "seed": 5, "max_tokens": 300, "extra_body": fields}
    chat = client.chat.completions.create(messages=MESSAGES, **common).choices[0]
    plain = client.completions.create(prompt=PROMPT, **common).choices[0]
    for text, reason in ((chat.message.content or "", chat.finish_reason), (plain.text, plain.finish_reason)):
        assert reason == "stop" and check(text)


def test_any_object(server: ThreadServer) -> None:
    answer = server.chat(PROMPT, response_format={"type": "json_object"}, max_tokens=40).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


def test_without_the_library_the_answer_says_what_to_install(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_trt.runtime.structured.compiler import GrammarCompiler

    core = server.llm.core
    fresh = GrammarCompiler(core.codec.tokenizer, core.engine.manifest.target_dims.vocab_size, frozenset())
    monkeypatch.setattr(core.maker, "grammars", fresh)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = server.chat(guided_regex="a")
    assert answer.status_code == 400
    assert "pip install --editable '.[structured]'" in answer.json()["error"]["message"]
    assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("method", ["ar", "ddtree", "dflash"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_must_end_ends_before_min_tokens(server: ThreadServer, method: str, stream: bool) -> None:
    """Behind the word only a stop token is allowed, which min_tokens would forbid."""
    (stop,) = server.llm.codec.encode("x")
    body = {"guided_regex": "cards?(x)?", "stop_token_ids": [stop], "min_tokens": 20, "max_tokens": 40, "n": 2}
    answer = server.chat(PROMPT, **body, method=method, temperature=0.7, seed=1, stream=stream)
    choices = [c for event in events_of(answer.text) or [answer.json()] for c in event["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop", "stop"]
    part = "delta" if stream else "message"
    assert "".join(c[part].get("content") or "" for c in choices if c["index"] == 0) in ("card", "cards")
