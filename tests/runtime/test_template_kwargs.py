"""Variables of the chat template for one request: through every way in, over what the engine was built with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_pair
from pacing import complete
from serving import thread_server

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.cli import app
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec

# In the words of the tests' tokenizer. The engine is built with enable_thinking false.
TEMPLATE = """{% for message in messages %}{{ message.content }} {% endfor %}
{%- if add_generation_prompt %}t7
{%- if enable_thinking is defined and enable_thinking is false %} t8 t9{% endif %}
{%- for word in words or [] %} {{ word }}{% endfor %}{% endif %}"""
CHAT: list[dict[str, str]] = [{"role": "user", "content": "t5"}]
PARAMS = SamplingParams(max_tokens=4)
CASES: list[tuple[dict[str, Any] | None, list[int]]] = [
    (None, [5, 7, 8, 9]),
    ({}, [5, 7, 8, 9]),
    ({"enable_thinking": True}, [5, 7]),
    ({"words": ["t3", "t4"]}, [5, 7, 8, 9, 3, 4]),
    ({"enable_thinking": None, "words": ["t2"]}, [5, 7, 2]),
]
WRONG: list[tuple[Any, str]] = [
    ({"thinking": False}, "chat_template_kwargs thinking: the target's chat template has no such variable; it has"),
    ({"messages": []}, "chat_template_kwargs messages is set by every request itself; leave it out"),
    ({"add_generation_prompt": False}, "chat_template_kwargs add_generation_prompt is set by every request itself"),
    ({"a b\n": 1}, r"chat_template_kwargs 'a b\n': the target's chat template has no such variable"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats")
    target, drafter = make_pair(path)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    output = path / "engine"
    arguments = {"enable_thinking": False}
    compile_engine(
        BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=output, chat_template_args=arguments)
    )
    return output


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


@pytest.mark.parametrize(("given", "ids"), CASES)
def test_generate_and_stream(llm: LLM, given: dict[str, Any] | None, ids: list[int]) -> None:
    both = llm.generate([CHAT, CHAT], PARAMS, chat_template_kwargs=given)
    assert [output.prompt_token_ids for output in both] == [ids, ids]
    assert both[0].outputs[0].token_ids == llm.generate([ids], PARAMS)[0].outputs[0].token_ids
    parts = list(llm.stream(CHAT, PARAMS, chat_template_kwargs=given))
    assert {tuple(part.prompt_token_ids) for part in parts} == {tuple(ids)}
    assert llm.generate(CHAT, PARAMS)[0].prompt_token_ids == CASES[0][1]  # the next request's are its own


def test_many_callers(engine: Path) -> None:
    async def ask() -> None:
        llm = AsyncLLM(engine)
        try:
            for given, ids in CASES:
                whole = await complete(llm, CHAT, PARAMS, chat_template_kwargs=given)
                parts = [part async for part in llm.submit(CHAT, PARAMS, chat_template_kwargs=given)]
                grown = [part async for part in llm.generate(CHAT, PARAMS, chat_template_kwargs=given)]
                assert whole.prompt_token_ids == parts[0].prompt_token_ids == grown[-1].prompt_token_ids == ids
            with pytest.raises(UsageError, match="no such variable"):
                llm.submit(CHAT, PARAMS, chat_template_kwargs={"thinking": True})
        finally:
            llm.shutdown()

    asyncio.run(ask())


@pytest.mark.parametrize(("given", "message"), [*WRONG, (["enable_thinking"], "must be an object of names and values")])
def test_what_the_template_never_looks_at(llm: LLM, given: Any, message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError) as caught:
            call(CHAT, PARAMS, chat_template_kwargs=given)
        assert message in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("prompt", ["t5", [5, 7], [[5], [7]]])
def test_a_prompt_without_a_template_takes_none(llm: LLM, prompt: Any) -> None:
    with pytest.raises(
        UsageError, match="chat_template_kwargs are for chat messages, and this prompt is text or token"
    ):
        llm.generate(prompt, PARAMS, chat_template_kwargs={"enable_thinking": True})
    assert llm.generate(prompt, PARAMS, chat_template_kwargs={})


def test_an_engine_without_a_template(tiny_engine: Path, tmp_path: Path) -> None:
    codec = TextCodec(tiny_engine, {})
    codec.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat_template_kwargs x: the target's tokenizer has no chat template"):
        codec.encode(CHAT, {"x": 1})


def test_served(engine: Path) -> None:
    with thread_server(engine) as server:
        for given, ids in CASES:
            answer = server.chat("t5", max_tokens=4, chat_template_kwargs=given)
            assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len(ids)
        assert "enable_thinking" in server.chat("t5", chat_template_kwargs={"thinking": 1}).text
        for given, message in WRONG:
            error = server.chat("t5", chat_template_kwargs=given).json()["error"]
            assert error["message"].startswith(message) and error["param"] == "chat_template_kwargs"
            assert error["code"] == "invalid_value"
        answer = server.chat("t5", chat_template_kwargs=["enable_thinking"])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"
        body = {"prompt": "t5", "chat_template_kwargs": {"enable_thinking": True}}
        error = server.http.post("/v1/completions", json=body).json()["error"]
        assert error["code"] == "unknown_parameter" and error["param"] == "chat_template_kwargs"


def test_run(engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["run", str(engine), "--prompt", "t5", "--max-tokens", "4", "--json"]
    option = ["--chat-template-arg", "enable_thinking=true", "--chat-template-arg", 'words=["t3"]']
    assert not app([*call, *option], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == [5, 7, 3]
    assert app([*call, "--chat-template-arg", "thinking=true"], standalone_mode=False) == 2
    assert "--chat-template-arg thinking: the target's chat template has no such" in capsys.readouterr().err
    assert app([*call, *option, "--raw"], standalone_mode=False) == 2
    assert "--raw does without" in capsys.readouterr().err
