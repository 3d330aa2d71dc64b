"""What stands around the two endpoints: tokens, version, browsers, the log, a server's own limits and template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from command_line import in_this_process
from documents import blocks_of
from pacing import WAIT_S, wait_for
from serving import ProcessServer, ThreadServer, metrics, thread_server

from ddtree_trt import __version__
from ddtree_trt.errors import UsageError
from ddtree_trt.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "examples" / "tools.jinja"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    options: dict[str, Any] = {"default_max_tokens": 6, "allowed_origins": f"{PAGE}, http://localhost:3000"}
    with thread_server(tiny_engine, api_key="k", chat_template=TOOLS.read_text(), **options) as server:
        yield server


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


def test_tokens_of_chats(server: ThreadServer) -> None:
    for body in (CHAT, {**CHAT, "tools": [TOOL]}):
        ids = server.http.post("/tokenize", json=body).json()["tokens"]
        usage = server.chat(CHAT["messages"][0]["content"], **{k: v for k, v in body.items() if k == "tools"}).json()
        assert usage["usage"]["prompt_tokens"] == len(ids)
        text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text.endswith("<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n")
        assert ("weather" in text) is ("tools" in body)


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/tokenize", {}, "prompt", "one of prompt and messages"),
        ("/tokenize", {"prompt": "x", **CHAT}, "prompt", "one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "messages", "need messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": True}, "add_special_tokens", "must be False"),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"no": 1}}, "chat_template_kwargs", "no such variable"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "surrogate"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt", "200000 characters"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", "does not exist here"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens", "token id -1 is outside the vocabulary"),
        ("/detokenize", {"tokens": [10**400]}, "tokens", "outside the vocabulary"),
        ("/detokenize", {"tokens": "5"}, "tokens", "must be a list"),
    ],
)
def test_wrong_tokens_are_explained(server: ThreadServer, path: str, body: Any, param: str, text: str) -> None:
    content = json.dumps(body)
    answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param and text in error["message"]


def test_the_version_is_told(server: ThreadServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_pages_of_allowed_origins_may_call(server: ThreadServer) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as browser:  # which sends no key with its question
        allowed = browser.options("/v1/chat/completions", headers={"Origin": PAGE, **asks})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = browser.options("/v1/chat/completions", headers={"Origin": "https://other.example", **asks})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        error = browser.get("/v1/models", headers={"Origin": PAGE})  # which the page can read
        assert error.status_code == 401 and error.headers["access-control-allow-origin"] == PAGE
    with server.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Origin": "http://localhost:3000"}
    ) as stream:
        assert stream.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_without_allowed_origins_browsers_keep_out(tiny_engine: Path) -> None:
    with thread_server(tiny_engine) as server:
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        answer = server.http.options("/v1/chat/completions", headers=asks)
        assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_wrong_options_are_refused() -> None:
    for origins in ("app.example", '["*"]', "https://app.example/", "https://a.example,,https://b.example"):
        with pytest.raises(UsageError, match=r"allowed_origins must be \* or origins such as https://app.example"):
            ServeOptions(allowed_origins=origins)
    with pytest.raises(UsageError, match="default_max_tokens must be from 1 to"):
        ServeOptions(default_max_tokens=0)
    for template, fault in (
        ("{% if %}", "cannot be parsed"),
        ("hello", "reads no messages"),
        ("", "reads no messages"),
    ):
        with pytest.raises(UsageError, match=f"chat_template.*{fault}"):
            ServeOptions(chat_template=template)


def test_chats_without_a_limit_end_at_the_servers(server: ThreadServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client:
        hot: dict[str, Any] = {"model": "tiny", "messages": CHAT["messages"], "temperature": 5, "seed": 1}
        answer = client.chat.completions.create(**hot, extra_body={"ignore_eos": True})
        assert answer.usage and answer.usage.completion_tokens == 6 and answer.choices[0].finish_reason == "length"
        more = client.chat.completions.create(**hot, max_completion_tokens=9, extra_body={"ignore_eos": True})
        assert more.usage and more.usage.completion_tokens == 9, "a request's own limit may be above it"
    almost_full = "5" * (
        2044 - server.http.post("/tokenize", json={"messages": [{"role": "user", "content": ""}]}).json()["count"]
    )
    usage = server.chat(almost_full, ignore_eos=True).json()["usage"]
    assert usage == usage | {"prompt_tokens": 2044, "completion_tokens": 4}, "the context is below it"


def test_bookkeeping_of_openais_clients_is_accepted(server: ThreadServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client:
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], service_tier="auto", store=False, metadata={"a": "b"}
        )
        assert answer.choices
        with pytest.raises(openai.BadRequestError, match="use chat_template_kwargs, such as"):
            client.chat.completions.create(model="tiny", messages=CHAT["messages"], reasoning_effort="low")
        with pytest.raises(openai.NotFoundError, match="no Responses API; use POST /v1/chat/completions"):
            client.responses.create(model="tiny", input="x")


def test_the_example_of_tools_is_as_shown(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document's program, with the template that the project has for it."""
    blocks = blocks_of(ROOT / "docs" / "serving.md")
    (program,) = [b.text for b in blocks if b.language == "python" and "tool_choice" in b.text]
    (shown,) = [b.text for b in blocks if "python tools.py" in b.text]
    with thread_server(tiny_engine, chat_template=TOOLS.read_text()) as server:
        capsys.readouterr()  # the server's own line
        exec(compile(program.replace("http://127.0.0.1:8000", server.url), "tools.py", "exec"), {})
    assert capsys.readouterr().out == shown.partition("$ python tools.py\n")[2]


def test_every_request_has_a_line(tiny_engine: Path, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS.read_text())
    options = ("--request-log", "--chat-template", str(template))
    with ProcessServer(tiny_engine, *options) as server, httpx.Client(base_url=server.url, timeout=None) as client:
        chat = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20, "n": 2, "tools": [TOOL]})
        stream = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
        assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
        wait_for(lambda: metrics(client)["vllm:num_requests_running"] == 0)
        server.terminate()
        code, log = server.wait()
    assert code == 0
    lines = log.splitlines()
    usage = chat.json()["usage"]
    figures = rf"{usage['prompt_tokens']} prompt tokens, 0 cached, {usage['completion_tokens']} new"
    speed = r"first after \d+\.\d{3} s, \d+\.\d tokens/s, \d+\.\d a round; (stop|length)"
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{date} {chat.json()['id']}: {figures}, {speed}(, stop)?", lines[0]), lines
    assert re.fullmatch(rf"{date} {stream.headers['x-request-id']}-0: .* 3 new, {speed}", lines[1]), lines
    assert len(lines) == 2


def test_a_template_that_is_no_file_is_named(
    tiny_engine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call, path = in_this_process(capfd), tmp_path / "none.jinja"
    answer = call("serve", tiny_engine, "--chat-template", path)
    reason = "cannot be read (No such file or directory); give a Jinja template"
    assert answer == (2, "", f"error: --chat-template {path} {reason}\n")


def test_figures_have_no_twins_that_say_when_they_began(server: ThreadServer) -> None:
    for accept in ("text/plain", "application/openmetrics-text"):
        page = server.http.get("/metrics", headers={"Accept": accept}).text
        assert "vllm:num_requests_running" in page and "_created" not in page
