"""Every sampling parameter with values nobody should give, through every door: an answer, or a sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_triton import Instance, TritonError, loaded
from serving import ThreadServer

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.errors import UsageError
from ddtree_trt.triton.export import export_triton

FIELDS = sorted(field.name for field in dataclasses.fields(SamplingParams))
JSON_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 20, 21, 64, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, -(10**400), 0.5),
    *(-0.0, 1e-38, 1e-320, 1e38, 1e308, float("nan"), float("inf"), -float("inf")),
    *(True, False, None, "", "5", "-1", "0.5", "1e400", "9" * 5000, "auto", "ar", "x", "\ud800", "\x00"),
    *([], [[]], [None], ["5"], [5, -1], [10**400], ["a", ""], ["\ud800"], [0.5], [True]),
    *({}, {"5": 1}, {"5": 10**400}, {"5": float("nan")}, {"5": True}, {"x": 1}, {"-1": 1}, {"9" * 5000: 1}, {"5": {}}),
)
OBJECTS: tuple[Any, ...] = (
    *(np.int64(2), np.uint64(2**64 - 1), np.float32(0.5), np.float64("nan"), np.float16("inf"), np.bool_(True)),
    *(np.array(2), np.array([2, 3]), np.array([0.5]), Fraction(1, 2), Fraction(10**400), 1j, b"x", object(), int, {5}),
    *({5: 1}, {np.int64(5): np.float32(2)}, {None: 1}, {5: None}, {10**5000: 1}, [np.int64(3)], 10**5000, range(3)),
)
LONGEST_SENTENCE = 1000

Door = Callable[[str, Any], str | None]  # a parameter, its value → why it is refused


@pytest.fixture
def python(llm: LLM) -> Door:
    def door(name: str, value: Any) -> str | None:
        try:
            outputs = llm.generate("x", SamplingParams(**{"max_tokens": 2, name: value}))
        except UsageError as error:
            return str(error)
        assert all(math.isfinite(p.logprob) for o in outputs[0].outputs for p in o.logprobs or [])
        return None

    return door


@pytest.fixture
def http(server: ThreadServer) -> Door:
    def door(name: str, value: Any) -> str | None:
        content = json.dumps({"prompt": "x", "max_tokens": 2, name: value})
        response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 200:
            return None
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and name in error["message"]
        assert error["param"] is None or error["param"].split(".")[0] in (name, "method", "prompt"), error
        return str(error["message"])

    return door


@pytest.fixture(scope="module")
def instance(small_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    repository = tmp_path_factory.mktemp("models")
    with loaded(export_triton(small_engine, repository, "m", link=True)) as instance:
        yield instance


@pytest.fixture
def triton(instance: Instance) -> Door:
    def door(name: str, value: Any) -> str | None:
        sampling = np.array([[json.dumps({"max_tokens": 2, name: value}).encode()]], object)
        inputs = {"text_input": np.array([[b"x"]], object), "sampling_parameters": sampling}
        try:
            list(instance.start(inputs).responses())
        except TritonError as error:
            assert error.code == "INVALID_ARG", error
            return str(error)
        return None

    return door


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("through", ["python", "http", "triton"])
def test_a_value_is_taken_or_the_door_says_why_not(
    through: str, name: str, request: pytest.FixtureRequest, python: Door
) -> None:
    door: Door = request.getfixturevalue(through)
    values = (*JSON_VALUES, *(OBJECTS if through == "python" else ()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of overflows
        answers = [(value, door(name, value)) for value in values]
    taken = [value for value, reason in answers if reason is None]
    assert all(reason is None or 0 < len(reason) <= LONGEST_SENTENCE for _, reason in answers)
    if through == "http":
        assert len(taken) < len(values) or name == "stop", "nothing is refused"
        # The server has no rules of its own but for types, and limits of lists.
        assert not [v for v in taken if v is not None and not isinstance(v, dict) and python(name, v) is not None]


@pytest.mark.parametrize(
    "params", [5, "x", {"temperature": 1}, [None], [{}], object()], ids=lambda value: type(value).__name__
)
def test_what_are_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(UsageError, match="sampling_params must be SamplingParams"):
        llm.generate("x", params)
