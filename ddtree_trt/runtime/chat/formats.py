"""How an engine's model writes reasoning and calls of tools, recognised by its chat template or named by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.chat.events import ChatMessage
from ddtree_trt.runtime.chat.json_calls import END_OF_CALL, PYTHON_TAG, TOOL_CALL, BareJson, TaggedJson
from ddtree_trt.runtime.chat.reader import END_OF_THINKING, THINK, MessageReader, Thinking, ToolFormat, read_message
from ddtree_trt.runtime.chat.tools import ToolUse, read_use
from ddtree_trt.runtime.chat.xml_calls import XmlCalls
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.text.codec import TextCodec

AUTO, NONE = "auto", "none"
# The names are vLLM's.
HERMES, QWEN3_CODER, LLAMA3_JSON = "hermes", "qwen3_coder", "llama3_json"
TOOL_PARSERS = (HERMES, QWEN3_CODER, LLAMA3_JSON)
QWEN3, DEEPSEEK_R1 = "qwen3", "deepseek_r1"
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1)

MARKS = (THINK, END_OF_THINKING, TOOL_CALL, END_OF_CALL, PYTHON_TAG)
_TAIL = 32  # tokens of a prompt's end, in which a template may have opened a block of reasoning or closed it

_JSON_IN_TAGS = re.compile(r"<tool_call>(?:\\n|\s)*\{+\s*\\*[\"'](?:name|arguments)")
_PARAMETERS = re.compile(r"\\*[\"']parameters\\*[\"']\s*:")


def tool_parser_of(template: str) -> str | None:
    """The parser of calls as a chat template writes them; None where none is known."""
    if "<function=" in template and "<parameter=" in template:
        return QWEN3_CODER
    if _JSON_IN_TAGS.search(template):
        return HERMES
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and _PARAMETERS.search(template)):
        return LLAMA3_JSON
    return None


class ChatFormat:
    """What an engine's chats are made of.

    Attributes:
        tool_parser: one of TOOL_PARSERS; None where calls are not recognised.
        reasoning_parser: one of REASONING_PARSERS; None where answers have no reasoning, or it stays in the content.
    """

    def __init__(self, codec: TextCodec, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        """`auto` recognises the parser by the chat template, `none` uses none. Raises UsageError for unknown names."""
        self._codec = codec
        template = codec.template_text
        self.tool_parser = _chosen("tool parser", tool_parser, TOOL_PARSERS, tool_parser_of(template))
        found = QWEN3 if END_OF_THINKING in template else None
        self.reasoning_parser = _chosen("reasoning parser", reasoning_parser, REASONING_PARSERS, found)

    def check_tools(self, use: ToolUse) -> None:
        """Raises UsageError where tools are given that this engine cannot call."""
        if use.tools and not self._codec.takes_tools:
            raise UsageError("tools: this engine's chat template has no place for them; leave them out")
        if use.tools and self.tool_parser is None:
            raise UsageError(
                "tools: the format in which this engine's model calls them is not recognised by its chat template; "
                f"start the server with --tool-parser, one of {', '.join(TOOL_PARSERS)}"
            )

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking:
        """How the answer to a prompt begins: the template may have opened a block of reasoning, or closed an empty
        one, and otherwise the model opens it."""
        if self.reasoning_parser is None:
            return "never"
        end = self._codec.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if end.endswith(END_OF_THINKING):
            return "never"
        return "open" if end.endswith(THINK) or self.reasoning_parser == DEEPSEEK_R1 else "possible"

    def tool_format(self, use: ToolUse) -> ToolFormat | None:
        """What reads the calls of an answer; None where there can be none."""
        if not use.tools:
            return None
        formats: Mapping[str | None, Any] = {HERMES: TaggedJson, LLAMA3_JSON: BareJson}
        return XmlCalls(use.schemas) if self.tool_parser == QWEN3_CODER else formats[self.tool_parser]()

    def reader(self, thinking: Thinking, use: ToolUse) -> MessageReader | None:
        """A reader of an answer that arrives in pieces; None where all of it is content."""
        tools = self.tool_format(use)
        return (
            MessageReader(thinking, tools, live=True, parallel=use.parallel) if tools or thinking != "never" else None
        )

    def messages(self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None = None) -> list[ChatMessage]:
        """The completions of a chat as messages: content, reasoning and calls of the `tools` that it was given.

        Raises UsageError for tools that this engine cannot call.
        """
        use = read_use(tools, None, None)
        self.check_tools(use)
        thinking, format_ = self.thinking(output.prompt_token_ids), self.tool_format(use)
        return [read_message(each.text, thinking, format_) for each in output.outputs]


def _chosen(what: str, given: str, known: Sequence[str], found: str | None) -> str | None:
    if given not in (AUTO, NONE, *known):
        raise UsageError(f"the {what} must be one of {', '.join((AUTO, NONE, *known))}, not {shown(given)}")
    return {AUTO: found, NONE: None}.get(given, given)
