"""How an engine's model writes reasoning and calls of tools, recognised by its chat template or named by the user."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.chat.calls import END_OF_CALL, PYTHON_TAG, TOOL_CALL, BareJson, TaggedJson, ToolFormat, XmlCalls
from ddtree_trt.runtime.chat.constraints import constraint
from ddtree_trt.runtime.chat.parsers import ReasoningParser, ToolParser, tool_parser_of
from ddtree_trt.runtime.chat.reader import END_OF_THINKING, THINK, ChatMessage, MessageReader, Thinking, read_message
from ddtree_trt.runtime.chat.tools import ToolUse, read_use
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.runtime.text.codec import TextCodec

MARKS = (THINK, END_OF_THINKING, TOOL_CALL, END_OF_CALL, PYTHON_TAG)
_TAIL = 32  # tokens of a prompt's end, in which a template may have opened a block of reasoning or closed it


class ChatFormat:
    """What an engine's chats are made of.

    Attributes:
        tool_parser: `none` where calls are not recognised.
        reasoning_parser: `none` where answers have no reasoning, or it stays in the content.
    """

    def __init__(
        self, codec: TextCodec, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParser = "auto"
    ) -> None:
        """`auto` recognises the parser by the chat template."""
        self._codec = codec
        template = codec.template_text
        self.tool_parser = tool_parser_of(template) if tool_parser == "auto" else tool_parser
        reasons: ReasoningParser = "qwen3" if END_OF_THINKING in template else "none"
        self.reasoning_parser = reasons if reasoning_parser == "auto" else reasoning_parser

    def check_tools(self, use: ToolUse) -> None:
        """Raises UsageError where tools are given that this engine cannot call."""
        if not use.tools:
            return
        self._codec.check_takes_tools()
        if self.tool_parser == "none":
            raise UsageError(
                "tools: the format in which this engine's model calls them is not recognised by its chat template; "
                "give a tool_parser, to a server as --tool-parser"
            )

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The special tokens that mark reasoning and calls, which must not be left out of an answer's text."""
        return tuple(sorted(self._codec.special_tokens(MARKS)))

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking:
        """How the answer to a prompt begins: the template may have opened a block of reasoning, or closed one."""
        if self.reasoning_parser == "none":
            return "never"
        end = self._codec.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if end.endswith(END_OF_THINKING):
            return "never"
        return "open" if end.endswith(THINK) or self.reasoning_parser == "deepseek_r1" else "possible"

    def tool_format(self, use: ToolUse) -> ToolFormat | None:
        """What reads the calls of an answer; None where there can be none."""
        if not use.tools or self.tool_parser == "none":
            return None
        if self.tool_parser == "qwen3_coder":
            return XmlCalls(use.schemas)
        return TaggedJson() if self.tool_parser == "hermes" else BareJson()

    def constraint(
        self, use: ToolUse, thinking: Thinking, structured: StructuredOutput | None
    ) -> StructuredOutput | None:
        """What the answer is held to: that the model calls tools where it must, that calls of strict tools satisfy
        their schemas, and the constraint of the request itself, which begins behind the reasoning.

        Raises UsageError where the request asks for both.
        """
        of_tools = None
        if use.tools and self.tool_parser != "none":
            of_tools = constraint(self.tool_parser, use, thinking, self._codec.added_tokens.intersection(MARKS))
        if structured is None:
            return of_tools
        if of_tools is not None:
            why = "tool_choice requires a call" if use.choice == "required" else "a strict tool constrains it already"
            raise UsageError(f"structured output cannot be had of this answer, because {why}; leave one of them out")
        if thinking != "never" and structured.after is None:
            return replace(structured, after=END_OF_THINKING)
        return structured

    def reader(self, thinking: Thinking, use: ToolUse) -> MessageReader | None:
        """A reader of an answer that arrives in pieces; None where all of it is content."""
        tools = self.tool_format(use)
        return MessageReader(thinking, tools, parallel=use.parallel) if tools or thinking != "never" else None

    def messages(self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None = None) -> list[ChatMessage]:
        """An output's completions as messages. Raises UsageError for `tools` that this engine cannot call."""
        use = read_use(tools, None, None)
        self.check_tools(use)
        thinking, format_ = self.thinking(output.prompt_token_ids), self.tool_format(use)
        return [read_message(each.text, thinking, format_) for each in output.outputs]
