"""StructuredOutput: what its construction refuses, and the forms in which values are kept."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.record import MAX_CHARACTERS, StructuredOutput

TAG = {"begin": "<a>", "schema": True, "end": "</a>"}
WRONG: list[tuple[dict[Any, Any], str]] = [
    ({}, "exactly one of json_schema, json_object, regex, choice, grammar, tags is needed, and none was given"),
    ({"json_object": False}, "and none was given"),
    ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ({"regex": "a", "json_schema": False}, "not json_schema and regex"),
    ({"json_schema": "{"}, "the schema is not JSON: "),
    ({"json_schema": 5}, "a schema must be a JSON object or a boolean, not 5"),
    ({"json_schema": "[]"}, r"a schema must be a JSON object or a boolean, not \[\]"),
    ({"json_schema": {"enum": [float("nan")]}}, "the schema cannot be written as JSON"),
    ({"json_schema": {"enum": [b"x"]}}, "the schema cannot be written as JSON"),
    ({"json_schema": "[" * 100_000}, "the schema is nested too deeply"),
    ({"json_schema": {"title": "\ud800"}}, "half of a surrogate pair"),
    ({"json_object": 1}, "json_object must be true or false, not 1"),
    ({"regex": 5}, "regex must be a text, not 5"),
    ({"regex": ""}, "regex must be a text that is not empty"),
    ({"grammar": ""}, "grammar must be a text that is not empty"),
    ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"at most {MAX_CHARACTERS} are taken"),
    ({"choice": [""]}, r"choice\[0\] must be a text that is not empty"),
    ({"choice": [1]}, r"choice\[0\] must be a text, not 1"),
    ({"choice": map(str, range(10_001))}, "choice has 10001 texts, at most 10000 are taken"),
    ({"tags": "x"}, "tags must be a list, not 'x'"),
    ({"tags": [{"begin": "<a>"}]}, "a tag has begin, schema and end"),
    ({"tags": [{**TAG, "begin": ""}]}, "a tag's begin must be a text that is not empty"),
    ({"tags": [{**TAG, "schema": 3}]}, "a schema must be a JSON object or a boolean, not 3"),
    ({"tags": [TAG], "at_least": -1}, "at_least must be an integer from 0 to 65536, not -1"),
    ({"tags": [TAG], "at_least": 3, "at_most": 2}, "at_most 2 is below 3"),
    ({"tags": [TAG], "after": 3}, "after must be a text, not 3"),
    ({"regex": "a", "after": ""}, "after must be a text that is not empty"),
    ({"regex": "a", "after": "x" * 257}, "after has 257 characters, at most 256 are taken; give its last ones"),
    ({"choice": ["x" * 600_000, "y" * 600_000]}, f"choice has 1200000 characters, at most {MAX_CHARACTERS} are taken"),
    ({"pattern": "a"}, "unknown name 'pattern'; known are json, after, "),
    ({cast(str, None): "a"}, "unknown name None; known are"),
    ({"json": {}, "json_schema": {}}, "json and json_schema are the same"),
]


@pytest.mark.parametrize(("values", "reason"), WRONG, ids=[reason[:40] for _, reason in WRONG])
def test_what_is_refused(values: dict[Any, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        SamplingParams.from_mapping({"structured": values})
    assert str(caught.value).startswith("structured")


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(UsageError, match="structured must be a StructuredOutput or an object of its fields, not 5"):
        SamplingParams(structured=5)  # type: ignore[arg-type]


def test_a_schema_is_kept_as_text_in_its_own_order() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    record = StructuredOutput(json_schema=schema)
    schema["type"] = "array"
    assert record.json_schema == '{"properties": {"b": {}, "a": {}}, "type": "object"}'
    assert (
        record
        == StructuredOutput(json_schema=record.json_schema)
        == StructuredOutput.from_mapping({"json": schema | {"type": "object"}})
    )
    assert hash(record) == hash(StructuredOutput(json_schema=record.json_schema))
    assert StructuredOutput(json_schema=False).json_schema == "false"
