"""What stands around the two endpoints: tokens, version, browsers, a server's own limits and template."""

import runpy
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from documents import blocks_of
from pacing import WAIT_S
from serving import ThreadServer, thread_server

from ddtree_trt import LLM, __version__
from ddtree_trt.errors import UsageError
from ddtree_trt.serve.options import ServeOptions

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
    assert server.http.get("/version").json() == {"version": __version__}
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
        ("tool_parser", ("x",), "must be one of auto, none, hermes, .*, not 'x'"),
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
    # A request's own limits may be above it.
    for limit, count in (({}, 6), ({"max_completion_tokens": 9}, 9), ({"min_tokens": 8}, 8)):
        answer = guarded.http.post("/v1/chat/completions", json={**hot, **limit}).json()
        assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"
    empty = guarded.http.post("/tokenize", json={"messages": [{"role": "user", "content": ""}]}).json()["count"]
    usage = guarded.chat("5" * (2044 - empty), ignore_eos=True).json()["usage"]
    assert usage == usage | {"prompt_tokens": 2044, "completion_tokens": 4}, "the context is below it"


def test_the_example_of_tools_is_as_shown(
    tiny_engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the template that the project has for it."""
    (shown,) = [b.text for b in blocks_of(ROOT / "docs" / "serving.md") if "examples/tools.py" in b.text]
    template = (ROOT / "examples" / "tools.jinja").read_text()
    with thread_server(tiny_engine, chat_template=template) as server:
        capsys.readouterr()  # the server's own line
        monkeypatch.setattr(sys, "argv", ["tools.py", server.url])
        runpy.run_path(str(ROOT / "examples" / "tools.py"))
    assert capsys.readouterr().out == shown.partition("$ python examples/tools.py\n")[2]


@pytest.mark.parametrize("params", [5, {"temperature": 1}, [None]], ids=str)
def test_what_are_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(UsageError, match="sampling_params must be SamplingParams"):
        llm.generate("x", params)
