"""Tools and reasoning with the official client: a real server whose model writes what each family's models write."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from dictation import LLAMA3, OPENS_THINKING, QWEN3, QWEN3_CODER, Dictation, with_template
from serving import ThreadServer, thread_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any], **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


WEATHER, CLOCK = tool("get_weather", SCHEMA, description="Weather of a city"), tool("clock", NOTHING)
BOTH, STRICT = [WEATHER, CLOCK], tool("get_weather", SCHEMA, strict=True)
ASK: list[Any] = [{"role": "user", "content": "hi"}]
CITY = 'Zü"rich\n🙂'
ARGUMENTS = {"city": CITY, "days": 3}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>'
XML = (
    f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
BARE = f'{{"name": "get_weather", "parameters": {TEXT}}}'
# A template, special tokens by those that they replace, and a call as the family's models write it.
FAMILIES: dict[str, tuple[str, dict[str, str], str]] = {
    "qwen": (QWEN3, {}, HERMES),
    "coder": (QWEN3_CODER, {}, XML),
    "llama": (LLAMA3, {"<|pad|>": "<|python_tag|>"}, BARE),
    "thinker": (OPENS_THINKING, {"<|pad|>": "</think>", "<|mask|>": "<tool_call>"}, HERMES),
}
OFF: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@dataclass
class Chat:
    """A server, its client, and what its model says."""

    server: ThreadServer
    client: openai.OpenAI
    model: Dictation

    def create(self, text: str, messages: list[Any] = ASK, **fields: Any) -> Any:
        self.model.say(text)
        (choice,) = self.client.chat.completions.create(model="tiny", messages=messages, **fields).choices
        return choice

    def chunks(self, text: str, **fields: Any) -> list[Any]:
        """The choices of a stream's chunks."""
        self.model.say(text)
        stream = self.client.chat.completions.create(model="tiny", messages=ASK, stream=True, **fields)
        return [chunk.choices[0] for chunk in stream]


def called(choice: Any) -> list[tuple[str, Any]]:
    """The calls of a choice."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def said(chunks: list[Any], field: str = "content") -> str:
    return "".join(getattr(c.delta, field, None) or "" for c in chunks)


@contextmanager
def chat_with(engine: Path, **options: Any) -> Iterator[Chat]:
    with (
        thread_server(engine, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(server, client, Dictation(server.llm.engine, server.llm.codec))


@pytest.fixture(scope="module")
def chats(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Chat]]:
    """A chat by family."""
    with ExitStack() as stack:

        @cache
        def open_chat(family: str) -> Chat:
            template, special, _ = FAMILIES[family]
            engine = with_template(tiny_engine, tmp_path_factory.mktemp(family) / "engine", template, special)
            return stack.enter_context(chat_with(engine))

        yield open_chat


@pytest.fixture
def qwen(chats: Callable[[str], Chat]) -> Chat:
    return chats("qwen")


@pytest.mark.parametrize(("family", "mark"), [*((family, "") for family in FAMILIES), ("llama", "<|python_tag|>")])
def test_a_call_whole_and_streamed(chats: Callable[[str], Chat], family: str, mark: str) -> None:
    chat, thought = chats(family), "So.\n</think>\n\n" if family == "thinker" else ""
    text = thought + mark + FAMILIES[family][2]
    choice = chat.create(text, tools=BOTH)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and called(choice) == [("get_weather", ARGUMENTS)]
    assert (choice.message.model_extra or {}).get("reasoning_content") == ("So." if thought else None)

    chunks = chat.chunks(text, tools=BOTH)
    assert chunks[0].delta.role == "assistant"
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    (streamed,) = [c.delta.tool_calls[0] for c in chunks if c.delta.tool_calls]
    assert (streamed.index, streamed.type) == (0, "function") and dict(streamed.function) == dict(call.function)
    assert streamed.id.startswith("call_") and streamed.id != call.id
    assert said(chunks) == ""


def test_the_client_s_own_stream_puts_the_message_together(qwen: Chat) -> None:
    other = '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text = "<think>\nWhich?\n</think>\n\nTwo:\n" + HERMES + other
    qwen.model.say(text)
    with qwen.client.chat.completions.stream(model="tiny", messages=ASK, tools=BOTH) as stream:
        stream.until_done()
        (streamed,) = stream.get_final_completion().choices
    whole = qwen.create(text, tools=BOTH)
    assert called(streamed) == called(whole) == [("get_weather", ARGUMENTS), ("clock", {})]
    assert streamed.message.content == whole.message.content == "Two:"
    assert len({c.id for c in whole.message.tool_calls}) == 2
    assert whole.message.model_extra["reasoning_content"] == "Which?"
    one = qwen.create(HERMES + other, tools=BOTH, parallel_tool_calls=False)
    assert called(one) == [("get_weather", ARGUMENTS)]


def test_a_conversation_with_results(qwen: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer goes back as the client's library has it, and the template is given calls and results."""
    answer = qwen.create("<think>\nHm.\n</think>\n\n" + HERMES, tools=[WEATHER]).message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "name": "get_weather", "content": "sunny"}
    seen: list[str] = []
    render = qwen.server.llm.codec.render

    def noting(*given: Any) -> str:
        seen.append(render(*given))
        return seen[-1]

    monkeypatch.setattr(qwen.server.llm.codec, "render", noting)
    choice = qwen.create("It is sunny.", [*ASK, answer, result], tools=[WEATHER])
    assert choice.message.content == "It is sunny." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop" and "tool_calls" not in choice.message.model_fields_set
    assert "<think>\nHm.\n</think>" in seen[0] and "<tool_response>\nsunny\n</tool_response>" in seen[0]
    assert f'{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>' in seen[0]


@pytest.mark.parametrize("family", ["qwen", "thinker"])
def test_reasoning(chats: Callable[[str], Chat], family: str) -> None:
    chat, whole = chats(family), "<think>\nOne\n\ntwo <tool_call>\n</think>\n\nThree"
    text = whole if family == "qwen" else whole.removeprefix("<think>\n")
    message = chat.create(text).message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Three", "One\n\ntwo <tool_call>")
    chunks = chat.chunks(text, tools=[CLOCK], logprobs=True)
    assert (said(chunks), said(chunks, "reasoning_content")) == ("Three", "One\n\ntwo <tool_call>")
    if family == "qwen":
        assert chat.create(text, **OFF).message.content == text, "the template closed the block"
    else:
        assert chat.create("Three", max_tokens=1).message.content is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_must_be(chats: Callable[[str], Chat], family: str) -> None:
    """The model would rather talk; then it calls what it must, and stops when its calls are complete."""
    chat, call = chats(family), FAMILIES[family][2]
    off: dict[str, Any] = OFF if family in ("qwen", "thinker") else {}
    named = {"type": "function", "function": {"name": "clock"}}
    talking = chat.create("No, I will not call a tool.", tools=BOTH, tool_choice=named, **off)
    assert called(talking) == [("clock", {})]
    assert talking.finish_reason == "tool_calls" and talking.message.content is None
    required: dict[str, Any] = {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False, **off}
    assert called(chat.create(call, **required)) == [("get_weather", ARGUMENTS)]
    assert chat.chunks(call, **required)[-1].finish_reason == "tool_calls"
    # What is forbidden is not written: a number of days that the schema does not allow.
    assert called(chat.create(call.replace("3", "77"), **required)) == [("get_weather", {**ARGUMENTS, "days": 7})]


@pytest.mark.parametrize(("family", "opening"), [("thinker", ""), ("qwen", "<think>\n")])
def test_reasoning_before_a_call_and_before_json(chats: Callable[[str], Chat], family: str, opening: str) -> None:
    chat, thought = chats(family), f"{opening}I reason.\n</think>\n\n"
    choice = chat.create(thought + "I will not.", tools=[CLOCK], tool_choice="required", max_tokens=90)
    assert choice.message.model_extra["reasoning_content"] == "I reason." and called(choice) == [("clock", {})]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    choice = chat.create(thought + "No JSON.", response_format=schema)
    assert choice.message.model_extra["reasoning_content"] == "I reason."
    assert json.loads(choice.message.content) == {"a": 1}


JSON, MUST = {"response_format": {"type": "json_object"}}, {"tools": [CLOCK], "tool_choice": "required"}
DIGITS = {"type": "string", "pattern": "^[0-9]+$"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("family", "fields", "text"),
    [
        ("qwen", {**JSON, **MUST}, "because tool_choice requires a call; leave one of them out"),
        ("qwen", {**JSON, "tools": [STRICT]}, "because a strict tool constrains it already"),
        (
            "qwen",
            {**MUST, "tools": [CLOCK, tool("f", {"type": "strange"})]},
            "tools: f's json_schema '.*strange.*' cannot",
        ),
        ("coder", {**MUST, "tools": [tool("f", {"properties": {"d": DIGITS}})]}, "because of pattern of parameter 'd'"),
        ("llama", {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL, CALL]}]}, "only one call at a time"),
    ],
)
def test_what_cannot_be_had(chats: Callable[[str], Chat], family: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        chats(family).create("x", **fields)
