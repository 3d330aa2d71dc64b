"""Constraints on the output in inference requests: by our name, vLLM's, and TensorRT-LLM's guides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_trt import SamplingParams, StructuredOutput
from ddtree_trt.errors import UsageError
from ddtree_trt.triton.requests import parse
from ddtree_trt.triton.settings import TRTLLM


def strings(text: str) -> Any:
    return np.array([[text.encode()]], object)


def params(inputs: dict[str, Any], **parameters: Any) -> SamplingParams:
    nothing = frozenset[str]()
    given = {"text_input": strings("x"), **inputs}
    call = parse(given, TRTLLM, parameters=parameters, timeout_us=0, requested=nothing, declared=nothing)
    return call.params


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"sampling_parameters": strings('{"structured": {"regex": "A+"}}')}, StructuredOutput(regex="A+")),
        (
            {"sampling_parameters": strings('{"guided_json": {"title": "A"}}')},
            StructuredOutput(json_schema={"title": "A"}),
        ),
        ({"sampling_parameters": strings('{"guided_choice": ["A", "b"]}')}, StructuredOutput(choice=("A", "b"))),
        (
            {"guided_decoding_guide_type": strings("json_schema"), "guided_decoding_guide": strings('{"title": "A"}')},
            StructuredOutput(json_schema={"title": "A"}),
        ),
        ({"guided_decoding_guide_type": strings("json")}, StructuredOutput(json_object=True)),
        (
            {"guided_decoding_guide_type": strings("regex"), "guided_decoding_guide": strings("A")},
            StructuredOutput(regex="A"),
        ),
        ({"guided_decoding_guide_type": strings("")}, None),
    ],
    ids=str,
)
def test_constraints_on_the_output(inputs: dict[str, Any], expected: StructuredOutput | None) -> None:
    assert params(inputs).structured == expected


def test_constraints_as_request_parameters() -> None:
    found = params({}, structured='{"regex": "A+"}').structured
    assert found == StructuredOutput(regex="A+")
    both = {"guided_decoding_guide_type": strings("json"), "sampling_parameters": strings('{"guided_regex": "a"}')}
    with pytest.raises(UsageError, match="structured is given twice, the second time by sampling_parameters"):
        params(both)
    with pytest.raises(UsageError, match="guided_decoding_guide: the schema is not JSON"):
        params({"guided_decoding_guide_type": strings("json_schema"), "guided_decoding_guide": strings("{")})
    with pytest.raises(UsageError, match="guided_decoding_guide_type must be one of json, json_schema, regex"):
        params({"guided_decoding_guide_type": strings("xml")})
