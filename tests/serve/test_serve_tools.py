"""Tools and reasoning with the official client: a real server whose model writes what each family's models write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from dictation import LLAMA3, OPENS_THINKING, QWEN3, QWEN3_CODER, Dictation, with_template
from serving import ThreadServer, thread_server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
ASK: list[Any] = [{"role": "user", "content": "hi"}]
CITY = 'Zü"rich\n🙂'
ARGUMENTS = {"city": CITY, "days": 3}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


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


@contextmanager
def chat_with(engine: Path, **options: Any) -> Iterator[Chat]:
    with (
        thread_server(engine, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(server, client, Dictation(server.llm.engine, server.llm.codec))


def engine_with(template: str, name: str, **special: str) -> Any:
    @pytest.fixture(scope="module", name=name)
    def fixture(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
        rename = {f"<|{old}|>": new for old, new in special.items()}
        engine = with_template(tiny_engine, tmp_path_factory.mktemp(name) / "engine", template, rename)
        with chat_with(engine) as chat:
            yield chat

    return fixture


qwen = engine_with(QWEN3, "qwen")
coder = engine_with(QWEN3_CODER, "coder")
llama = engine_with(LLAMA3, "llama", pad="<|python_tag|>")  # a special token, as Llama's own
thinker = engine_with(OPENS_THINKING, "thinker", pad="</think>", mask="<tool_call>")

HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>'
XML = (
    f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
BARE = f'{{"name": "get_weather", "parameters": {TEXT}}}'
FAMILIES = [("qwen", HERMES), ("coder", XML), ("llama", BARE), ("llama", "<|python_tag|>" + BARE), ("thinker", HERMES)]


@pytest.mark.parametrize(("family", "text"), FAMILIES)
def test_a_call_whole_and_streamed(request: pytest.FixtureRequest, family: str, text: str) -> None:
    chat: Chat = request.getfixturevalue(family)
    thought = "So.\n</think>\n\n" if family == "thinker" else ""
    choice = chat.create(thought + text, tools=[WEATHER, CLOCK])
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert (choice.message.model_extra or {}).get("reasoning_content") == ("So." if thought else None)

    chunks = chat.chunks(thought + text, tools=[WEATHER, CLOCK])
    assert chunks[0].delta.role == "assistant" and [c.finish_reason for c in chunks if c.finish_reason] == [
        "tool_calls"
    ]
    (streamed,) = [c.delta.tool_calls[0] for c in chunks if c.delta.tool_calls]
    assert (streamed.index, streamed.type) == (0, "function") and dict(streamed.function) == dict(call.function)
    assert streamed.id.startswith("call_") and streamed.id != call.id
    assert "".join(c.delta.content or "" for c in chunks) == ""


def test_the_client_s_own_stream_puts_the_message_together(qwen: Chat) -> None:
    other = '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    qwen.model.say("<think>\nWhich?\n</think>\n\nTwo:\n" + HERMES + other)
    with qwen.client.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER, CLOCK]) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Two:" and message.tool_calls is not None
    assert [c.function.name for c in message.tool_calls] == ["get_weather", "clock"]
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    whole = qwen.create("<think>\nWhich?\n</think>\n\nTwo:\n" + HERMES + other, tools=[WEATHER, CLOCK])
    assert [c.function.name for c in whole.message.tool_calls] == ["get_weather", "clock"]
    assert len({c.id for c in whole.message.tool_calls}) == 2
    assert whole.message.model_extra["reasoning_content"] == "Which?" and whole.message.content == "Two:"
    one = qwen.create(HERMES + other, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [c.function.name for c in one.message.tool_calls] == ["get_weather"]


def test_a_conversation_with_results(qwen: Chat) -> None:
    """The answer goes back as the client's library has it, and the template is given calls and results."""
    answer = qwen.create("<think>\nHm.\n</think>\n\n" + HERMES, tools=[WEATHER]).message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "name": "get_weather", "content": "sunny"}
    seen: list[Any] = []
    render = qwen.server.llm.codec.render

    def noting(*args: Any, **kwargs: Any) -> str:
        seen.append(render(*args, **kwargs))
        return str(seen[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen.server.llm.codec, "render", noting)
        choice = qwen.create("It is sunny.", [*ASK, answer, result], tools=[WEATHER])
    assert choice.message.content == "It is sunny." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop" and "tool_calls" not in choice.message.model_fields_set
    assert "<think>\nHm.\n</think>" in seen[0] and "<tool_response>\nsunny\n</tool_response>" in seen[0]
    assert f'{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>' in seen[0]


def test_malformed_calls_are_content(qwen: Chat, llama: Chat) -> None:
    for chat, text in (
        (qwen, "<tool_call>\n{'name': 'clock', 'arguments': {}}\n</tool_call>"),
        (qwen, '<tool_call>\n{"name": "clock"}\n</tool_call>'),
        (llama, '{"answer": 42}'),
        (llama, "<|python_tag|>print(42)"),
    ):
        choice = chat.create(text, tools=[CLOCK])
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        chunks = chat.chunks(text, tools=[CLOCK])
        assert "".join(c.delta.content or "" for c in chunks) == text and chunks[-1].finish_reason == "stop"
    cut = qwen.create(HERMES, tools=[WEATHER], max_tokens=40)
    assert cut.finish_reason == "length" and HERMES.startswith(cut.message.content) and not cut.message.tool_calls


def test_without_tools_nothing_is_a_call(qwen: Chat) -> None:
    assert qwen.create(HERMES).message.content == HERMES
    seen: list[Any] = []
    encode = qwen.server.llm.codec.encode

    def noting(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(prompt)
        return encode(prompt, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen.server.llm.codec, "encode", noting)
        choice = qwen.create(HERMES, tools=[WEATHER], tool_choice="none")
    assert choice.message.content == HERMES and choice.message.tool_calls is None
    assert not any("Tools:" in text for text in seen if isinstance(text, str))


def test_reasoning(qwen: Chat, thinker: Chat) -> None:
    thought = "<think>\nOne\n\ntwo <tool_call>\n</think>\n\nThree"
    for chat, text in ((qwen, thought), (thinker, thought.removeprefix("<think>\n"))):
        message = chat.create(text).message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Three", "One\n\ntwo <tool_call>")
        deltas = [c.delta for c in chat.chunks(text, tools=[CLOCK], logprobs=True)]
        reasoning = "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas)
        assert (reasoning, "".join(d.content or "" for d in deltas)) == ("One\n\ntwo <tool_call>", "Three")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert qwen.create(thought, extra_body=off).message.content == thought, "the template closed the block"
    assert thinker.create("Three", max_tokens=1).message.content is None


def test_log_probabilities_are_those_of_every_token(qwen: Chat) -> None:
    whole = qwen.create(HERMES, tools=[WEATHER], logprobs=True)
    chunks = qwen.chunks(HERMES, tools=[WEATHER], logprobs=True)
    tokens = [t.token for c in chunks if c.logprobs for t in c.logprobs.content]
    assert tokens == [t.token for t in whole.logprobs.content]
    assert "".join(tokens).startswith(HERMES.partition("Z")[0])


@pytest.mark.parametrize("family", ["qwen", "coder", "llama", "thinker"])
def test_a_call_that_must_be(request: pytest.FixtureRequest, family: str) -> None:
    """The model would rather talk; then it calls what it must, and stops when its calls are complete."""
    chat: Chat = request.getfixturevalue(family)
    call = dict(FAMILIES)[family].removeprefix("<|python_tag|>")
    off: dict[str, Any] = (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}} if family in ("qwen", "thinker") else {}
    )
    named = {"type": "function", "function": {"name": "clock"}}
    talking = chat.create("No, I will not call a tool.", tools=[WEATHER, CLOCK], tool_choice=named, **off)
    assert [c.function.name for c in talking.message.tool_calls] == ["clock"]
    assert json.loads(talking.message.tool_calls[0].function.arguments) == {}
    assert talking.finish_reason == "tool_calls" and talking.message.content is None
    required: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    willing = chat.create(call, **required, **off)
    assert json.loads(willing.message.tool_calls[0].function.arguments) == ARGUMENTS
    streamed = chat.chunks(call, **required, **off)
    assert streamed[-1].finish_reason == "tool_calls"
    # What is forbidden is not written: a number of days that the schema does not allow.
    wrong = chat.create(call.replace("3", "77"), **required, **off)
    assert json.loads(wrong.message.tool_calls[0].function.arguments) == {**ARGUMENTS, "days": 7}


def test_reasoning_before_a_call_that_must_be_and_before_json(thinker: Chat, qwen: Chat) -> None:
    for chat, thought in ((thinker, "I reason.\n</think>"), (qwen, "<think>\nI reason.\n</think>")):
        choice = chat.create(thought + "\n\nI will not.", tools=[CLOCK], tool_choice="required", max_tokens=90)
        assert choice.message.model_extra["reasoning_content"] == "I reason."
        assert choice.message.tool_calls[0].function.name == "clock"
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
        choice = chat.create(thought + "\n\nNo JSON.", response_format=schema)
        assert choice.message.model_extra["reasoning_content"] == "I reason."
        assert json.loads(choice.message.content) == {"a": 1}


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize(("family", "text"), [("qwen", HERMES), ("coder", XML), ("llama", BARE)])
def test_strict_tools_may_be_left_alone_but_not_called_wrongly(
    request: pytest.FixtureRequest, family: str, text: str
) -> None:
    chat: Chat = request.getfixturevalue(family)
    tools = [strict(WEATHER), CLOCK]
    assert chat.create("No call.", tools=tools).message.content == "No call."
    choice = chat.create(text.replace("3", "77"), tools=tools)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {**ARGUMENTS, "days": 7}
    loose = chat.create(text.replace("3", "77"), tools=[WEATHER, CLOCK])
    assert json.loads(loose.message.tool_calls[0].function.arguments) == {**ARGUMENTS, "days": 77}


def test_what_cannot_be_had_together(qwen: Chat) -> None:
    json_object = {"type": "json_object"}
    for fields, text in (
        ({"tools": [CLOCK], "tool_choice": "required"}, "because tool_choice requires a call; leave one of them out"),
        ({"tools": [strict(CLOCK)]}, "because a strict tool constrains it already"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            qwen.create("x", response_format=json_object, **fields)
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        qwen.create("x", tools=[bad], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="only one call at a time"), ExitStack() as stack:
        raise_for = stack.enter_context(pytest.MonkeyPatch.context())
        raise_for.setattr(qwen.server.llm.codec.tokenizer, "chat_template", LLAMA3)
        raise_for.delitem(vars(qwen.server.llm.codec), "template_text", raising=False)
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        qwen.create("x", [*ASK, {"role": "assistant", "tool_calls": [call, call]}])


def test_several_answers_have_calls_of_their_own(qwen: Chat) -> None:
    qwen.model.say(HERMES)
    answer: Any = qwen.client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], n=3, max_tokens=200)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in calls}) == 3
    assert all(json.loads(call.function.arguments) == ARGUMENTS for call in calls)
    stream: Any = qwen.client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for each in chunk.choices:
            texts[each.index] += each.delta.tool_calls[0].function.arguments or "" if each.delta.tool_calls else ""
    assert texts == {0: calls[0].function.arguments, 1: calls[0].function.arguments}


def test_parsers_named_by_the_user(tiny_engine: Path, tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}:"
    engine = with_template(tiny_engine, tmp_path / "engine", template)
    with chat_with(engine, tool_parser="hermes", reasoning_parser="deepseek_r1") as chat:
        message = chat.create("Hm.</think>" + HERMES, tools=[WEATHER]).message
        assert message.tool_calls[0].function.name == "get_weather"
        assert message.model_extra["reasoning_content"] == "Hm."
