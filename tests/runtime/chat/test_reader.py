"""Reading answers: the same message however the text is divided, calls as they were written, nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_trt.runtime.chat.events import CallArguments, CallBegin, ChatMessage, Event, joined
from ddtree_trt.runtime.chat.json_calls import BareJson, TaggedJson
from ddtree_trt.runtime.chat.json_text import JsonText, Malformed
from ddtree_trt.runtime.chat.reader import MessageReader, Thinking, ToolFormat, read_message
from ddtree_trt.runtime.chat.xml_calls import XmlCalls

SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": ["number", "null"]},
            "on": {"anyOf": [{"type": "boolean"}, {"const": "later"}]},
            "unit": {"enum": ["c", "f"]},
            "list": {"type": "array"},
        }
    }
}
HERMES, LLAMA, XML = TaggedJson(), BareJson(), XmlCalls(SCHEMAS)


def plain(events: Sequence[Event]) -> list[Any]:
    """Events without the ids of calls, which are random."""
    return [(e.index, e.name) if isinstance(e, CallBegin) else e for e in joined(events)]


def in_pieces(text: str, cuts: Sequence[int], thinking: Thinking, tools: ToolFormat | None, live: bool) -> list[Any]:
    reader = MessageReader(thinking, tools, live=live)
    events: list[Event] = []
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        events += reader.push(text[start:end])
    return plain(events + reader.end())


def parts(message: ChatMessage) -> tuple[Any, ...]:
    return message.reasoning_content, message.content, [(c.name, c.arguments) for c in message.tool_calls]


CASES: list[tuple[str, ToolFormat, str, str | None, list[tuple[str, str]]]] = [
    ("no call", HERMES, "  Hello <tool> \n", "  Hello <tool> \n", []),
    ("empty", HERMES, "", "", []),
    ("one", HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, [("f", '{"a": 1}')]),
    ("no end of the tag", HERMES, '<tool_call>{"name":"f","arguments":{}}', None, [("f", "{}")]),
    ("half an end of the tag", HERMES, '<tool_call>{"name":"f","arguments":{}}\n</tool_', None, [("f", "{}")]),
    (
        "two between words, arguments first, other fields",
        HERMES,
        'A \n<tool_call>\n{"arguments": {"q": "}\\"{"}, "id": 3, "name": "g"}\n</tool_call>\n'
        '<tool_call>{"type": "function", "name": "f", "parameters": {"x": [1, {"y": null}]}}</tool_call>\nB\n',
        "A \n\n\nB",
        [("g", '{"q": "}\\"{"}'), ("f", '{"x": [1, {"y": null}]}')],
    ),
    (
        "a malformed one before a good one",
        HERMES,
        '<tool_call>{"name": f}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": f}</tool_call>',
        [("f", "{}")],
    ),
    (
        "a name with half a character",
        HERMES,
        '<tool_call>{"name": "\\ud800f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800f", "arguments": {}}</tool_call>',
        [],
    ),
    (
        "a name in escapes",
        HERMES,
        '<tool_call>{"name": "\\ud83d\\ude42", "arguments": {"a": "\\ud800"}}</tool_call>',
        None,
        [("🙂", '{"a": "\\ud800"}')],
    ),
    ("no name", HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("a list", HERMES, '<tool_call>{"name": "f", "arguments": []}', '<tool_call>{"name": "f", "arguments": []}', []),
    (
        "numbers that JSON lacks",
        HERMES,
        '<tool_call>{"name": NaN, "arguments": {}}',
        '<tool_call>{"name": NaN, "arguments": {}}',
        [],
    ),
    ("bare", LLAMA, '\n{"name": "f", "parameters": {"a": "ü🙂"}}', None, [("f", '{"a": "ü🙂"}')]),
    (
        "bare, several, a remark",
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\nDone; {',
        "Done; {",
        [("f", "{}"), ("g", "{}")],
    ),
    ("JSON that is no call", LLAMA, '{"name": "Bob"} is it', '{"name": "Bob"} is it', []),
    ("code", LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        "behind the token",
        LLAMA,
        'Well:<|python_tag|> {"name": "f", "parameters": {}}',
        "Well:",
        [("f", "{}")],
    ),
    ("braces in a sentence", LLAMA, 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
    (
        "typed parameters",
        XML,
        'So:\n<tool_call>\n<function=f>\n<parameter=text>\n a\n</b> "5"\n\n</parameter>\n<parameter=count>\n5\n'
        "</parameter>\n<parameter=ratio>\nNone\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=unit>\nc\n"
        '</parameter>\n<parameter=list>\n[1, "x"]\n</parameter>\n</function>\n</tool_call>',
        "So:",
        [
            (
                "f",
                '{"text": " a\\n</b> \\"5\\"\\n", "count": 5, "ratio": null, "on": true, "unit": "c", '
                '"list": [1, "x"]}',
            )
        ],
    ),
    (
        "values that are not of their type stay texts; ends left out",
        XML,
        "<tool_call>\n<function=f>\n<parameter=count>five\n<parameter=on>\nlater</function></tool_call>",
        None,
        [("f", '{"count": "five", "on": "later"}')],
    ),
    (
        "unknown function, no tag around it",
        XML,
        '<function=other>\n<parameter=x>\n5\n</parameter>\n<parameter=y>\n{"z": 1}\n</parameter>\n</function>',
        None,
        [("other", '{"x": "5", "y": {"z": 1}}')],
    ),
    (
        "a value that is nested too deeply stays a text",
        XML,
        f"<function=f>\n<parameter=list>\n{'[' * 257}{']' * 257}\n</parameter>\n</function>",
        None,
        [("f", f'{{"list": "{"[" * 257}{"]" * 257}"}}')],
    ),
    ("no parameters", XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", None, [("f", "{}")]),
    ("a function without an end", XML, "<function=f>\n<parameter=text>\nx", "<function=f>\n<parameter=text>\nx", []),
    ("a tag alone", XML, "<tool_call> and <function=", "<tool_call> and <function=", []),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_message_is_its_parts(tools: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parts(read_message(text, "never", tools)) == (None, content, calls)
    thought = f"<think>\nA {text} \n\n</think>\n\n{text}"
    # The line breaks behind the reasoning belong to it, whatever follows them.
    expected = read_message(text.lstrip("\n"), "never", tools).content or None
    cases: list[tuple[str, Thinking]] = [(thought, "possible"), (thought, "open"), (thought[8:], "open")]
    for opened, thinking in cases:
        assert parts(read_message(opened, thinking, tools)) == (f"A {text} ", expected, calls)


@pytest.mark.parametrize(("tools", "text"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_pieces_change_nothing(tools: ToolFormat, text: str) -> None:
    thought = f"\n<think>\n\n{text}\n</think>\n\n{text}"
    cases: list[tuple[str, Thinking]] = [(text, "never"), (thought, "possible")]
    for (whole, thinking), live in itertools.product(cases, (False, True)):
        expected = in_pieces(whole, [], thinking, tools, live)
        for cut in range(len(whole) + 1):
            assert in_pieces(whole, [cut], thinking, tools, live) == expected, cut
        assert in_pieces(whole, range(1, len(whole)), thinking, tools, live) == expected


WORDS = st.text(st.sampled_from("<tool_call>{}\"':, /=function&parameter\\\n;nameth<|python_tag|>éß🙂"), max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, max_size=6), st.sampled_from([HERMES, LLAMA, XML, None]), st.data())
def test_any_text_in_any_pieces(words: list[str], tools: ToolFormat | None, data: st.DataObject) -> None:
    """Texts of marks in disorder: nothing fails, and nothing is lost but white space around calls."""
    marks = ["<tool_call>", '{"name": "f", "arguments": {"a": "', "</tool_call>", "<function=f>", "<parameter=a>"]
    marks += ["</parameter>", "</function>", "<think>", "</think>", "<|python_tag|>", '"}}']
    text = "".join(itertools.chain(*((data.draw(st.sampled_from(marks)), word) for word in words)))
    thinking: Thinking = data.draw(st.sampled_from(["never", "open", "possible"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for live in (False, True):
        assert in_pieces(text, cuts, thinking, tools, live) == in_pieces(text, [], thinking, tools, live)
    message = read_message(text, thinking, tools)
    if not message.tool_calls and thinking == "never":
        assert message.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(), JSON, max_size=3)))
WRITTEN: dict[str, tuple[ToolFormat, Callable[[str, dict[str, Any], bool], str], str]] = {
    "hermes": (
        HERMES,
        lambda n, a, e: f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a, ensure_ascii=e)}}}\n</tool_call>',
        "\n",
    ),
    "llama": (LLAMA, lambda n, a, e: f'{{"name": "{n}", "parameters": {json.dumps(a, ensure_ascii=e)}}}', "; "),
}


@settings(max_examples=40, deadline=None)
@given(CALLS, st.sampled_from(sorted(WRITTEN)), st.booleans(), st.data())
def test_calls_come_back_as_written(
    calls: list[tuple[str, dict[str, Any]]], family: str, ascii_only: bool, data: st.DataObject
) -> None:
    """Any JSON object, its escapes and braces included, by Python's own writer."""
    tools, write, between = WRITTEN[family]
    text = between.join(write(name, arguments, ascii_only) for name, arguments in calls)
    message = read_message(text, "never", tools)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    assert message.content == (None if calls else "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert in_pieces(text, cuts, "never", tools, True) == in_pieces(text, [], "never", tools, False)


TEXTS = st.text(st.characters(blacklist_categories=["Cs"])).filter(lambda t: "</p" not in t and "<p" not in t)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS.filter(lambda t: "</f" not in t), max_size=3), st.data())
def test_texts_of_xml_come_back_as_written(values: list[str], data: st.DataObject) -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(len(values))}
    tools = XmlCalls({"f": {"properties": properties}})
    body = "".join(f"<parameter=p{i}>\n{value}\n</parameter>\n" for i, value in enumerate(values))
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = read_message(text, "never", tools).tool_calls
    assert json.loads(call.arguments) == {f"p{i}": value for i, value in enumerate(values)}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert in_pieces(text, cuts, "never", tools, True) == in_pieces(text, [], "never", tools, False)


def test_a_call_that_breaks_off_has_begun_in_a_stream_and_is_content_of_a_whole() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "tr'
    assert parts(read_message(text, "never", HERMES)) == (None, text, [])
    reader = MessageReader("never", HERMES, live=True)
    assert parts(ChatMessage.of(reader.push(text) + reader.end())) == (None, None, [("f", '{"a": "tr')])


def test_arguments_follow_as_they_are_written() -> None:
    reader = MessageReader("never", HERMES, live=True)
    assert reader.push('<tool_call>\n{"name": "f"') == []
    assert reader.push(', "arguments": ') == [], "they may still be no object"
    begin, first = reader.push('{"a": 1')
    assert isinstance(begin, CallBegin) and (begin.index, begin.name) == (0, "f") and begin.id.startswith("call_")
    assert first == CallArguments(0, '{"a": 1')
    assert reader.push(', "b": [') == [CallArguments(0, ', "b": [')]
    assert reader.push("2]}}\n</tool_") == [CallArguments(0, "2]}")]
    assert reader.push("call>") == [] and reader.end() == []


def test_only_the_first_call_where_calls_may_not_be_parallel() -> None:
    one = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for live in (False, True):
        reader = MessageReader("never", HERMES, live=live, parallel=False)
        message = ChatMessage.of(reader.push(one + "\n" + one.replace("1", "2") + "\nend") + reader.end())
        assert parts(message) == (None, "end", [("f", '{"a": 1}')])


def test_reasoning_without_an_end_is_reasoning() -> None:
    assert parts(read_message("<think>\nso <tool_call>", "possible", HERMES)) == ("so <tool_call>", None, [])
    assert parts(read_message("so\n", "open", None)) == ("so", None, [])
    assert parts(read_message("<think>\n\n</think>\n\nx", "possible", None)) == (None, "x", [])
    assert parts(read_message("x <think> y </think>", "possible", None)) == (None, "x <think> y </think>", [])
    assert parts(read_message("<think>x</think>", "never", None)) == (None, "<think>x</think>", [])


@settings(max_examples=200, deadline=None)
@given(JSON, st.booleans(), st.data())
def test_a_json_text_is_read_as_by_python(value: Any, ascii_only: bool, data: st.DataObject) -> None:
    """Texts of values with a character changed or left out: the same are refused, and where a value ends is found."""
    text = json.dumps({"": value}, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    place = data.draw(st.integers(0, len(text)))
    text = text[:place] + data.draw(st.sampled_from(["", '"', "\\", "}", "]", ",", "0", "-", "e", "\n", "x"])) + text[
        place + data.draw(st.integers(0, 1)) :
    ]  # fmt: skip
    try:
        _, length = json.JSONDecoder(parse_constant=no_number).raw_decode(text)
    except ValueError:
        length = None
    cut = data.draw(st.integers(0, len(text)))
    reader, read = JsonText(), 0
    try:
        for piece in (text[:cut], text[cut:]):
            read += reader.read(piece, 0)
        found = read if reader.done else None
    except Malformed:
        found = None
    assert found == (length if text.startswith(("{", "[", '"')) else found)


def no_number(name: str) -> Any:
    raise ValueError(name)


def test_arguments_that_are_no_json_are_sent_up_to_their_end() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": True, "b": "}"}}</tool_call>\nend'
    reader = MessageReader("never", HERMES, live=True)
    message = ChatMessage.of(reader.push(text) + reader.end())
    assert parts(message) == (None, "end", [("f", '{"a": True, "b": "}"}')])
    assert parts(read_message(text, "never", HERMES)) == (None, text, [])
