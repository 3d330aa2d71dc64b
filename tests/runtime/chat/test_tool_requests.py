"""What requests say of tools, and messages put into the form of chat templates."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dictation import LLAMA3, OPENS_THINKING, QWEN3, QWEN3_CODER, Dictation, with_template
from engine_builds import PACKAGED

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.chat.formats import ChatFormat
from ddtree_trt.runtime.chat.parsers import ReasoningParser
from ddtree_trt.runtime.chat.tools import ToolUse, read_use, template_messages
from ddtree_trt.runtime.text.codec import TextCodec


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


NAMED = {"type": "function", "function": {"name": "g"}}


def test_how_tools_are_to_be_used() -> None:
    tools = [tool(description="d", parameters={"type": "object"}, strict=True), tool("g", description=None)]
    use = read_use(tools, None, None)
    assert (use.choice, use.parallel, list(use.schemas)) == ("auto", True, ["f", "g"])
    assert [t.strict for t in use.tools] == [True, False]
    assert use.descriptions == [tool(description="d", parameters={"type": "object"}), tool("g")], "strict is ours"
    assert read_use(tools, "auto", False) == ToolUse(use.tools, "auto", False)
    assert read_use(tools, "required", True) == ToolUse(use.tools, "required", True)
    assert read_use(tools, NAMED, True) == ToolUse(use.tools[1:], "required", False)
    assert read_use(tools, "none", None) == read_use(None, "none", None) == read_use(None, None, None) == ToolUse()


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "text"),
    [
        ("x", None, None, "tools must be a list of at least one tool, not 'x'"),
        ([tool()] * 1025, None, None, "tools: 1025 were given, at most 1024 are taken"),
        ([tool(), {"type": "web_search"}], None, None, r"tools\[1\] must be .*, not {'type': 'web_search'}"),
        ([{"type": "function"}], None, None, r"tools\[0\] must be .*, not {'type': 'function'}"),
        ([tool("a b")], None, None, r"tools\[0\]\.function\.name must be 1 to 128 letters, .* not 'a b'"),
        ([tool(parameters=[])], None, None, r"tools\[0\]\.function\.parameters must be a JSON schema"),
        ([tool(), tool()], None, None, r"tools\[1\]\.function\.name: 'f' is there twice"),
        ([tool()], "any", None, "tool_choice must be 'none', 'auto', 'required' or .*, not 'any'"),
        ([tool()], NAMED, None, "tool_choice names 'g', which is not among the tools: f"),
        (None, "required", None, "tool_choice 'required' needs tools"),
        (None, None, False, "parallel_tool_calls needs tools"),
    ],
)
def test_what_is_wrong_with_tools_is_said(tools: Any, choice: Any, parallel: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read_use(tools, choice, parallel)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_messages_for_templates() -> None:
    messages: list[Any] = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": "é"}'), call(""), call({"b": 1})]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]
    assert template_messages(messages) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call({"a": "é"}), call({}), call({"b": 1})]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "assistant", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user"}, "needs a role and a content, texts: message 0 is"),
        ({"role": "assistant", "content": "", "tool_calls": ["f"]}, r"tool_calls\[0\] of message 0 must be"),
        ({"role": "assistant", "tool_calls": [call("{")]}, r"arguments of tool_calls\[0\] .* JSON object, not '{'"),
    ],
)
def test_what_is_wrong_with_messages_is_said(message: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        template_messages([message])


def codec_of(template: Any) -> TextCodec:
    codec = TextCodec(PACKAGED / "tokenizer", {})
    codec.tokenizer.chat_template = template
    return codec


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (QWEN3, "hermes", "qwen3"),
        (OPENS_THINKING, "hermes", "qwen3"),
        (QWEN3_CODER, "qwen3_coder", "none"),
        (LLAMA3, "llama3_json", "none"),
        (QWEN3.replace('\\n{"name', '\\n{\\"name'), "hermes", "qwen3"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "none", "none"),
        ("{{ tools }}<tool_call>name<arg_key>key</arg_key>", "none", "none"),
    ],
)
def test_parsers_are_recognised_by_the_template(template: str, calls: str, reasoning: str) -> None:
    found = ChatFormat(codec_of(template))
    assert (found.tool_parser, found.reasoning_parser) == (calls, reasoning)
    named = ChatFormat(codec_of(template), "llama3_json", "deepseek_r1")
    assert (named.tool_parser, named.reasoning_parser) == ("llama3_json", "deepseek_r1")


def test_engines_that_cannot_call() -> None:
    use = read_use([tool()], None, None)
    with pytest.raises(UsageError, match="tools: this engine's chat template has no place for them"):
        ChatFormat(codec_of("{{ messages[0].content }}")).check_tools(use)
    with pytest.raises(UsageError, match="not recognised by its chat template; give a tool_parser, to a server as"):
        ChatFormat(codec_of("{{ tools }}{{ messages[0].content }}")).check_tools(use)
    with pytest.raises(UsageError, match="has no place for them"):
        codec_of("{{ messages[0].content }}").encode([{"role": "user", "content": "x"}], tools=[tool()])
    with pytest.raises(UsageError, match="tools are for chat messages"):
        codec_of(QWEN3).encode("x", tools=[tool()])
    several = codec_of({"default": "{{ messages[0].content }}", "tool_use": QWEN3})
    several.check_takes_tools()
    assert ChatFormat(several).tool_parser == "hermes"


def test_whether_an_answer_begins_with_reasoning() -> None:
    chat = [{"role": "user", "content": "<think>"}]
    closed = {"enable_thinking": False}
    cases: list[tuple[str, dict[str, Any], ReasoningParser, str]] = [
        (QWEN3, {}, "auto", "possible"),
        (QWEN3, closed, "auto", "never"),
        (OPENS_THINKING, {}, "auto", "open"),
        (OPENS_THINKING, closed, "auto", "never"),
        (QWEN3, {}, "deepseek_r1", "open"),
        (QWEN3, closed, "deepseek_r1", "never"),
        (OPENS_THINKING, {}, "none", "never"),
        (LLAMA3, {}, "auto", "never"),
    ]
    for template, kwargs, parser, expected in cases:
        codec = codec_of(template)
        assert ChatFormat(codec, reasoning_parser=parser).thinking(codec.encode(chat, kwargs)) == expected


def test_special_tokens_are_kept_one_by_one() -> None:
    codec = TextCodec(PACKAGED / "tokenizer", {})
    mask, pad = codec.encode("<|mask|><|pad|>")
    ids = [mask, *codec.encode("é x"), pad, mask]
    kept = codec.special_tokens(["<|mask|>", "x", "</think>"])
    assert kept == {mask}
    assert codec.decode(ids) == "é x" and codec.decode(ids, keep=kept) == "<|mask|>é x<|mask|>"
    assert codec.decode(ids, skip_special_tokens=False, keep=kept) == "<|mask|>é x<|pad|><|mask|>"


# Through LLM: the prompt has the tools, and an output is read as a message


TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
PARAMS = SamplingParams(max_tokens=120)


@pytest.fixture(scope="module")
def engine(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The marks of calls are special tokens, which texts have only where tools were given."""
    names = {"<|pad|>": "<tool_call>", "<|mask|>": "</tool_call>"}
    return with_template(tiny_engine, tmp_path_factory.mktemp("chat") / "engine", QWEN3, names)


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


def test_an_output_is_a_message(llm: LLM) -> None:
    Dictation(llm.engine, llm.codec).say("<think>\nHm.\n</think>\n\n" + CALL)
    assert (llm.chat_format.tool_parser, llm.chat_format.reasoning_parser) == ("hermes", "qwen3")
    [output] = llm.generate(CHAT, PARAMS, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in llm.codec.decode(output.prompt_token_ids)
    assert CALL in output.outputs[0].text
    [message] = llm.chat_format.messages(output, TOOLS)
    assert (message.content, message.reasoning_content) == (None, "Hm.")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("f", {"a": "ü"})]
    assert "".join(part.outputs[0].text for part in llm.stream(CHAT, PARAMS, tools=TOOLS)) == output.outputs[0].text
    [plain] = llm.generate(CHAT, PARAMS)
    assert "<tool_call>" not in plain.outputs[0].text and '"name": "f"' in plain.outputs[0].text
    [back] = llm.generate([*CHAT, message.to_dict(), {"role": "tool", "content": "sun"}], PARAMS, tools=TOOLS)
    prompt = llm.codec.decode(back.prompt_token_ids, skip_special_tokens=False)
    assert f"<think>\nHm.\n</think>\n\n\n{CALL}" in prompt and "<tool_response>\nsun" in prompt
