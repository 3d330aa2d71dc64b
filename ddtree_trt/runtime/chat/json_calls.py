"""Calls of tools written as JSON: in `<tool_call>` tags by Qwen and Hermes, bare or behind a token by Llama 3."""

from __future__ import annotations

from ddtree_trt.runtime.chat.json_text import Malformed
from ddtree_trt.runtime.chat.reader import CallWriter, MessageReader
from ddtree_trt.runtime.chat.scanner import Scanner, Steps

TOOL_CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")


class TaggedJson:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; content may stand around them."""

    def read(self, reader: MessageReader) -> Steps[None]:
        scanner = reader.scanner

        def one(call: CallWriter) -> Steps[None]:
            yield from scanner.space()
            yield from read_call(scanner, call)
            yield from scanner.space()
            yield from end_of_tag(scanner)

        while mark := (yield from scanner.until((TOOL_CALL,), reader.content)):
            yield from reader.call(mark, one)


class BareJson:
    """`{"name": …, "parameters": {…}}` where the answer begins with it, or anywhere behind `<|python_tag|>`; further
    calls directly behind, with a semicolon or nothing between."""

    def read(self, reader: MessageReader) -> Steps[None]:
        scanner = reader.scanner
        yield from self._calls(reader, (yield from scanner.space()))
        while mark := (yield from scanner.until((PYTHON_TAG,), reader.content)):
            yield from self._calls(reader, mark + (yield from scanner.space()))

    def _calls(self, reader: MessageReader, before: str) -> Steps[None]:
        scanner = reader.scanner
        while (yield from reader.call(before, lambda call: read_call(scanner, call))):
            before = yield from scanner.space()
            if (yield from scanner.accept(";")):
                before += ";" + (yield from scanner.space())
            if (yield from scanner.peek()) != "{":
                reader.content(before)
                return


def read_call(scanner: Scanner, call: CallWriter) -> Steps[None]:
    """Read an object with a name and arguments, an object too. Its other fields are none of the call's."""
    yield from scanner.expect("{")
    name: str | None = None
    arguments: list[str] | None = None
    while True:
        yield from scanner.space()
        key = yield from scanner.json_string()
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        if key == "name" and name is None:
            name = yield from scanner.json_string()
            if not name:
                raise Malformed
            if arguments is not None:
                call.begin(name)
                call.arguments("".join(arguments))
        elif key in _ARGUMENTS and arguments is None:
            arguments = []
            if (yield from scanner.peek()) != "{":
                raise Malformed
            if name is not None:
                call.begin(name)
            read = scanner.braces if call.sent else scanner.json_value
            yield from read(arguments.append if name is None else call.arguments)
        else:
            yield from scanner.json_value(lambda _: None)
        yield from scanner.space()
        if (yield from scanner.accept("}")):
            break
        yield from scanner.expect(",")
    if not call.begun:
        raise Malformed


def end_of_tag(scanner: Scanner) -> Steps[None]:
    """Read `</tool_call>`, of which any part may be missing where the text ends."""
    if not (yield from scanner.peek()) or (yield from scanner.accept(END_OF_CALL)):
        return
    rest = scanner.text[scanner.at : scanner.at + len(END_OF_CALL)]  # no more: what follows may be long
    if not (scanner.ended and END_OF_CALL.startswith(rest)):
        raise Malformed
    scanner.at += len(rest)
