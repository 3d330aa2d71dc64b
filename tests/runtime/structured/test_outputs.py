"""Outputs under constraints: every one satisfies its constraint, and no method changes a token of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from ddtree_trt.runtime.llm import LLM
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


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_an_object_of_a_schema(llm: LLM, method: str, temperature: float) -> None:
    structured = StructuredOutput(json_schema=SCHEMA)
    params = {"max_tokens": 300, "temperature": temperature, "seed": 3, "structured": structured}
    (expected,) = llm.generate([PROMPT], SamplingParams(method="ar", **params))  # type: ignore[arg-type]
    (found,) = llm.generate([PROMPT], SamplingParams(method=method, **params))  # type: ignore[arg-type]
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].finish_reason == "stop"
    jsonschema.validate(json.loads(found.outputs[0].text), SCHEMA)
