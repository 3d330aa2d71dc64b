"""The work of reading answers grows with their length and no faster, whatever a model writes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ddtree_trt.runtime.chat.json_calls import BareJson, TaggedJson
from ddtree_trt.runtime.chat.reader import MessageReader, ToolFormat
from ddtree_trt.runtime.chat.xml_calls import XmlCalls

HERMES, LLAMA, XML = TaggedJson(), BareJson(), XmlCalls({"f": {"properties": {"text": {"type": "string"}}}})
ARGUMENTS = '{"name": "f", "arguments": {"a": '
LONG_TEXTS: dict[str, tuple[ToolFormat, str, str]] = {  # a format, how a text begins, and what it then repeats
    "an object that never closes": (HERMES, '<tool_call>{"x": {"a": 1', ', "b": [2, "<tool_call>"]'),
    "a string that never closes": (HERMES, '<tool_call>{"x": "', "a <tool_call> {"),
    "openings in openings": (HERMES, "", "<tool_call>" + ARGUMENTS),
    "openings in objects": (HERMES, "", '<tool_call>{"x": {"y": '),
    "openings in words": (HERMES, "", '<tool_call>{"x":'),
    "openings with escapes": (HERMES, "", '<tool_call>{"x": "\\"'),
    "braces": (HERMES, "<tool_call>", '{"a":'),
    "calls that lack the end of their tag": (HERMES, "", '<tool_call>{"name": "f", "arguments": {}} - '),
    "calls": (HERMES, "", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '),
    "bare openings": (LLAMA, "", "<|python_tag|>" + ARGUMENTS),
    "parameters without an end": (XML, "", "<function=f>\n<parameter=text>\n"),
    "parameters in tags": (XML, "", "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n"),
}


@pytest.mark.parametrize("pieces", [1, 7, None], ids=["characters", "pieces", "whole"])
@pytest.mark.parametrize(("tools", "begin", "repeated"), LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_reading_is_linear(tools: ToolFormat, begin: str, repeated: str, pieces: int | None) -> None:
    """Twice the text is twice the work: lines of the readers' code that run, and characters that are copied with the
    next piece."""
    for live in (False, True):
        work = [reading(tools, begin + repeated * n, pieces, live) for n in (40, 80)]
        assert work[1] < 2.3 * work[0], work


def reading(tools: ToolFormat, text: str, size: int | None, live: bool) -> int:
    """How much work it takes to read a text in pieces of a size."""
    work = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal work
        if "runtime/chat" not in frame.f_code.co_filename:
            return None
        work += event == "line"
        return count

    reader = MessageReader("never", tools, live=live)
    size = size or len(text)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for start in range(0, len(text), size):
            reader.push(text[start : start + size])
            work += len(reader.scanner.text)
        reader.end()
    finally:
        sys.settrace(before)
    return work
