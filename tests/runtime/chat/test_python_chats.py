"""Chats with tools through LLM and AsyncLLM: the prompt has them, and an output is read as a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dictation import QWEN3, Dictation, with_template
from pacing import complete

from ddtree_trt import LLM, AsyncLLM, SamplingParams
from ddtree_trt.errors import UsageError

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


async def test_the_same_from_many_callers(engine: Path) -> None:
    llm = AsyncLLM(engine)
    try:
        Dictation(llm.engine, llm.codec).say(CALL)
        output = await complete(llm, CHAT, PARAMS, tools=TOOLS)
        [message] = llm.chat_format.messages(output, TOOLS)
        assert message.tool_calls[0].name == "f"
        with pytest.raises(UsageError, match="tools are for chat messages"):
            await complete(llm, "hi", PARAMS, tools=TOOLS)
    finally:
        llm.shutdown()
