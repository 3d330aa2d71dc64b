"""Random schemas: every output is JSON that an independent validator accepts, and that of `ar`, token for token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from random_schemas import random_schema

from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.record import StructuredOutput

PROMPT = [{"role": "user", "content": "There are 6 drawers, each with 32 cards. How many cards are there?"}]
CHECKER = jsonschema.FormatChecker(["uuid", "ipv4"])


def validate(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


def satisfiable(schemas: Iterator[dict[str, Any]], llm: LLM) -> Iterator[dict[str, Any]]:
    """The schemas that the library takes. It refuses some that nothing satisfies."""
    for schema in schemas:
        try:
            llm.core.maker.grammars.check(StructuredOutput(json_schema=schema))
        except ValueError as error:
            assert "nsatisfiable" in str(error), schema
        else:
            yield schema


def schemas(seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    while True:
        yield random_schema(rng)


def test_random_tokens_make_valid_json_of_600_schemas(llm: LLM) -> None:
    """The sampler over logits that are noise: texts that no model would write, from all corners of the schemas."""
    core = llm.core
    vocab, ending = core.engine.manifest.target_dims.vocab_size, frozenset(core.engine.manifest.stop_token_ids)
    rng, kinds = np.random.default_rng(0), set[str]()
    for number, schema in zip(range(600), satisfiable(schemas(1), llm), strict=False):
        params = SamplingParams(temperature=1.0, seed=number, structured=StructuredOutput(json_schema=schema))
        assert params.structured is not None
        matcher = core.maker.grammars.matcher(params.structured, ending)
        sampler = Sampler(params, vocab, [], ending, matcher=matcher)
        output: list[int] = []
        while not matcher.ended:
            assert len(output) < 2000, schema
            output.append(sampler.choose(rng.normal(0, 2, vocab).astype(np.float32)))
            sampler.observe(output[-1:])
        text = llm.tokenizer.decode([t for t in output if t not in ending])
        validate(text, schema)
        kinds.add(type(json.loads(text)).__name__)
    assert kinds == {"dict", "list", "str", "int", "float", "bool", "NoneType"}


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_the_model_writes_them_as_ar_does(llm: LLM, method: str, count: int) -> None:
    chosen = [schema for schema, _ in zip(satisfiable(schemas(2), llm), range(count), strict=False)]
    outputs = {}
    for each in ("ar", method):
        params = [
            SamplingParams(
                method=each,
                tree_budget=8 if each == "ddtree" else "auto",
                max_tokens=400,
                temperature=float(place % 2),
                seed=place,
                n=1 + place % 2,
                structured=StructuredOutput(json_schema=schema),
            )
            for place, schema in enumerate(chosen)
        ]
        outputs[each] = llm.generate([PROMPT] * count, params)
    for schema, expected, found in zip(chosen, outputs["ar"], outputs[method], strict=True):
        for one, other in zip(expected.outputs, found.outputs, strict=True):
            assert other.token_ids == one.token_ids
            assert other.finish_reason == one.finish_reason
            if other.finish_reason == "stop":
                validate(other.text, schema)
    finished = [o.finish_reason == "stop" for each in outputs[method] for o in each.outputs]
    assert sum(finished) > 0.8 * len(finished)  # greedy numbers may go on for ever
