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
    "functions that lack the end of their tag": (XML, "", "<tool_call>\n<function=f>\n</function>\n - "),
    "functions with values that lack it": (XML, "", "<tool_call><function=f><parameter=n>1</parameter></function> - "),
    "functions whose names do not end": (XML, "", "<tool_call><function=f"),
    "a name that does not end": (XML, "<function=", "name "),
    "functions": (XML, "", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n"),
    "a long value": (XML, "<function=f><parameter=n>", "1, </param>\n"),
    "a value of line breaks": (XML, "<function=f><parameter=text>", "\n"),
    "many parameters": (XML, "<function=f><parameter=n>", "1</parameter><parameter=n>"),
    "parameters that lack their ends": (XML, "<function=f><parameter=n>", "<parameter=n>"),
    "white space": (XML, "", "<tool_call> \n \n"),
}


@pytest.mark.parametrize("pieces", [1, 7, None], ids=["characters", "pieces", "whole"])
@pytest.mark.parametrize(("tools", "begin", "repeated"), LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_reading_is_linear(tools: ToolFormat, begin: str, repeated: str, pieces: int | None) -> None:
    """Twice the text is twice the work: lines of the readers' code that run, and characters that it copies."""
    for live in (False, True):
        work = [reading(tools, begin + repeated * n, pieces, live) for n in (40, 80)]
        assert work[1] < 2.3 * work[0], work


class Counted(str):
    """A text that counts the characters copied from it and from what is made of it."""

    copied = 0

    def __getitem__(self, place: Any) -> Counted:
        return self._of(super().__getitem__(place))

    def __add__(self, other: str) -> Counted:
        return self._of(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._of(other.__add__(self))

    @classmethod
    def _of(cls, text: str) -> Counted:
        cls.copied += len(text)
        return cls(text)


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
    Counted.copied = 0
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for start in range(0, len(text), size):
            reader.push(Counted(text[start : start + size]))
        reader.end()
    finally:
        sys.settrace(before)
    return work + Counted.copied
