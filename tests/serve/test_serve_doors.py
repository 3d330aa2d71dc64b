"""What stands around the two endpoints: tokens, version, browsers, a server's own limits and template."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from documents import blocks_of
from fake_triton import Instance, TritonError, loaded
from pacing import WAIT_S
from serving import ThreadServer, thread_server

from ddtree_trt import LLM, SamplingParams, __version__
from ddtree_trt.errors import UsageError
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.triton.export import export_triton

ROOT = Path(__file__).resolve().parents[2]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PAGE = "https://app.example"


def test_tokens_of_texts_and_back(server: ThreadServer) -> None:
    text = "What is 12 + 30? <|im_end|>é"
    answer = server.http.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    ids = server.llm.tokenizer.encode(text, add_special_tokens=False)
    names = server.llm.tokenizer.convert_ids_to_tokens(ids)
    assert answer == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": names}
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    whole = server.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
    assert whole["usage"]["prompt_tokens"] == len(ids)
    longer = server.http.post("/tokenize", json={"prompt": "a " * 3000}).json()
    assert longer["count"] > longer["max_model_len"] and longer["token_strs"] is None


def test_tokens_of_chats(guarded: ThreadServer) -> None:
    for tools in ({}, {"tools": [TOOL]}):
        ids = guarded.http.post("/tokenize", json={**CHAT, **tools}).json()["tokens"]
        answer = guarded.http.post("/v1/chat/completions", json={**CHAT, **tools}).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        text = guarded.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text.endswith("<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n")
        assert ("weather" in text) is bool(tools)


def test_the_version_is_told(server: ThreadServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_pages_of_allowed_origins_may_call_and_no_others(guarded: ThreadServer, server: ThreadServer) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allows = "access-control-allow-"
    with httpx.Client(base_url=guarded.url, timeout=WAIT_S) as browser:  # which sends no key with its question
        allowed = browser.options("/v1/chat/completions", headers={"Origin": PAGE, **asks})
        assert allowed.status_code == 200 and allowed.headers[f"{allows}origin"] == PAGE
        assert "POST" in allowed.headers[f"{allows}methods"] and "authorization" in allowed.headers[f"{allows}headers"]
        refused = browser.options("/v1/chat/completions", headers={"Origin": "https://other.example", **asks})
        assert refused.status_code == 400 and f"{allows}origin" not in refused.headers
        error = browser.get("/v1/models", headers={"Origin": PAGE})  # which the page can read
        assert error.status_code == 401 and error.headers[f"{allows}origin"] == PAGE
    local = {"Origin": "http://localhost:3000"}
    stream = guarded.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=local)
    assert stream.headers[f"{allows}origin"] == local["Origin"] and stream.text.endswith("data: [DONE]\n\n")
    answer = server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **asks})
    assert answer.status_code == 405 and f"{allows}origin" not in answer.headers


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        (
            "allowed_origins",
            ("app.example", '["*"]', "https://app.example/", "https://a.example,,https://b.example"),
            r"must be \* or origins such as https://app.example",
        ),
        ("default_max_tokens", (0,), "must be from 1 to"),
        ("chat_template", ("{% if %}",), ".*cannot be parsed"),
        ("chat_template", ("hello", ""), ".*reads no messages"),
    ],
)
def test_wrong_options_are_refused(name: str, values: tuple[Any, ...], says: str) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"{name}.?{says}"):
            ServeOptions(**{name: value})


def test_chats_without_a_limit_end_at_the_servers(guarded: ThreadServer) -> None:
    hot = {**CHAT, "temperature": 5, "seed": 1, "ignore_eos": True}
    for limit, count in (({}, 6), ({"max_completion_tokens": 9}, 9)):  # a request's own limit may be above it
        answer = guarded.http.post("/v1/chat/completions", json={**hot, **limit}).json()
        assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"
    empty = guarded.http.post("/tokenize", json={"messages": [{"role": "user", "content": ""}]}).json()["count"]
    usage = guarded.chat("5" * (2044 - empty), ignore_eos=True).json()["usage"]
    assert usage == usage | {"prompt_tokens": 2044, "completion_tokens": 4}, "the context is below it"


def test_the_example_of_tools_is_as_shown(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document's program, with the template that the project has for it."""
    blocks = blocks_of(ROOT / "docs" / "serving.md")
    (program,) = [b.text for b in blocks if b.language == "python" and "tool_choice" in b.text]
    (shown,) = [b.text for b in blocks if "python tools.py" in b.text]
    template = (ROOT / "examples" / "tools.jinja").read_text()
    with thread_server(tiny_engine, chat_template=template) as server:
        capsys.readouterr()  # the server's own line
        exec(compile(program.replace("http://127.0.0.1:8000", server.url), "tools.py", "exec"), {})
    assert capsys.readouterr().out == shown.partition("$ python tools.py\n")[2]


# Every sampling parameter with values nobody should give, through every door: an answer, or a sentence


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
        assert error["type"] == "invalid_request_error"
        assert name in error["message"] or error["code"] == "invalid_json"  # half of a surrogate pair
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
