"""Reading answers: the same message however the text is divided, calls as they were written, nothing lost, in time
that grows with the text and no faster."""

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_trt.runtime.chat import calls
from ddtree_trt.runtime.chat import reader as reader_module
from ddtree_trt.runtime.chat.calls import BareJson, TaggedJson, ToolFormat, XmlCalls
from ddtree_trt.runtime.chat.reader import ChatMessage, Event, MessageReader, Text, Thinking, ToolCall, read_message

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


def in_pieces(text: str, cuts: Sequence[int], thinking: Thinking, tools: ToolFormat | None) -> tuple[Any, ...]:
    reader = MessageReader(thinking, tools)
    events: list[Event] = []
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        events += reader.push(text[start:end])
    return parts(ChatMessage.of(events + reader.end()))


def parts(message: ChatMessage) -> tuple[Any, ...]:
    return message.reasoning_content, message.content, [(c.name, c.arguments) for c in message.tool_calls]


Case = tuple[ToolFormat, str, str | None, list[tuple[str, str]]]  # a text, and the content and calls in it
NO_CALLS: dict[str, tuple[ToolFormat, str]] = {
    "no call": (HERMES, "  Hello <tool> \n"),
    "nothing": (HERMES, ""),
    "a name with half a character": (HERMES, '<tool_call>{"name": "\\ud800f", "arguments": {}}</tool_call>'),
    "numbers that JSON lacks": (HERMES, '<tool_call>{"name": NaN, "arguments": {}}'),
    "JSON that is no call": (LLAMA, '{"name": "Bob"} is it'),
    "code": (LLAMA, "<|python_tag|>print(1)"),
    "braces in a sentence": (LLAMA, 'Use {"name": "f", "parameters": {}}'),
    "a function without an end": (XML, "<function=f>\n<parameter=text>\nx"),
    "a tag alone": (XML, "<tool_call> and <function="),
}
CALLS_IN: dict[str, Case] = {
    "one": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, [("f", '{"a": 1}')]),
    "half an end of the tag": (HERMES, '<tool_call>{"name":"f","arguments":{}}\n</tool_', None, [("f", "{}")]),
    "two between words, arguments first, other fields": (
        HERMES,
        'A \n<tool_call>\n{"arguments": {"q": "}\\"{"}, "id": 3, "name": "g"}\n</tool_call>\n'
        '<tool_call>{"type": "function", "name": "f", "parameters": {"x": [1, {"y": null}]}}</tool_call>\nB\n',
        "A \n\n\nB",
        [("g", '{"q": "}\\"{"}'), ("f", '{"x": [1, {"y": null}]}')],
    ),
    "a malformed one before a good one": (
        HERMES,
        '<tool_call>{"name": f}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": f}</tool_call>',
        [("f", "{}")],
    ),
    "a name in escapes": (
        HERMES,
        '<tool_call>{"name": "\\ud83d\\ude42", "arguments": {"a": "\\ud800"}}</tool_call>',
        None,
        [("🙂", '{"a": "\\ud800"}')],
    ),
    "bare": (LLAMA, '\n{"name": "f", "parameters": {"a": "ü🙂"}}', None, [("f", '{"a": "ü🙂"}')]),
    "bare, several, a remark": (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\nDone; {',
        "Done; {",
        [("f", "{}"), ("g", "{}")],
    ),
    "behind the token": (LLAMA, 'Well:<|python_tag|> {"name": "f", "parameters": {}}', "Well:", [("f", "{}")]),
    "typed parameters": (
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
    "values that are not of their type stay texts; ends left out": (
        XML,
        "<tool_call>\n<function=f>\n<parameter=count>five\n<parameter=on>\nlater</function></tool_call>",
        None,
        [("f", '{"count": "five", "on": "later"}')],
    ),
    "unknown function, no tag around it": (
        XML,
        '<function=other>\n<parameter=x>\n5\n</parameter>\n<parameter=y>\n{"z": 1}\n</parameter>\n</function>',
        None,
        [("other", '{"x": "5", "y": {"z": 1}}')],
    ),
    "tags in a list, and in what is none": (
        XML,
        '<function=f><parameter=list>["</parameter>", "</function>"]</parameter><parameter=on>["x"</function>',
        None,
        [("f", '{"list": ["</parameter>", "</function>"], "on": "[\\"x\\""}')],
    ),
    "no parameters": (XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", None, [("f", "{}")]),
}
CASES: dict[str, Case] = {name: (tools, text, text, []) for name, (tools, text) in NO_CALLS.items()} | CALLS_IN


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES.values(), ids=CASES)
def test_a_message_is_its_parts(tools: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parts(read_message(text, "never", tools)) == (None, content, calls)
    thought = f"<think>\nA {text} \n\n</think>\n\n{text}"
    # The line breaks behind the reasoning belong to it, whatever follows them.
    expected = read_message(text.lstrip("\n"), "never", tools).content or None
    cases: list[tuple[str, Thinking]] = [(thought, "possible"), (thought, "open"), (thought[8:], "open")]
    for opened, thinking in cases:
        assert parts(read_message(opened, thinking, tools)) == (f"A {text} ", expected, calls)


@pytest.mark.parametrize(("tools", "text"), [case[:2] for case in CASES.values()], ids=CASES)
def test_pieces_change_nothing(tools: ToolFormat, text: str) -> None:
    thought = f"\n<think>\n\n{text}\n</think>\n\n{text}"
    cases: list[tuple[str, Thinking]] = [(text, "never"), (thought, "possible")]
    for whole, thinking in cases:
        expected = parts(read_message(whole, thinking, tools))
        for cut in range(len(whole) + 1):
            assert in_pieces(whole, [cut], thinking, tools) == expected, cut
        assert in_pieces(whole, range(1, len(whole)), thinking, tools) == expected


WORDS = st.text(st.sampled_from("<tool_call>{}\"':, /=function&parameter\\\n;nameth<|python_tag|>éß🙂"), max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, max_size=6), st.sampled_from([HERMES, LLAMA, XML, None]), st.data())
def test_any_text_in_any_pieces(words: list[str], tools: ToolFormat | None, data: st.DataObject) -> None:
    """Texts of marks in disorder: nothing fails, and nothing is lost but white space around calls."""
    marks = ["<tool_call>", '{"name": "f", "arguments": {"a": "', "</tool_call>", "<function=f>", "<parameter=a>"]
    marks += ["</parameter>", "</function>", "<think>", "</think>", "<|python_tag|>", '"}}', '["', '"]']
    text = "".join(itertools.chain(*((data.draw(st.sampled_from(marks)), word) for word in words)))
    thinking: Thinking = data.draw(st.sampled_from(["never", "open", "possible"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    message = read_message(text, thinking, tools)
    assert in_pieces(text, cuts, thinking, tools) == parts(message)
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
    assert in_pieces(text, cuts, "never", tools) == parts(message)


TEXTS = st.text(st.characters(blacklist_categories=["Cs"])).filter(lambda t: "</p" not in t and "<p" not in t)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS.filter(lambda t: "</f" not in t), max_size=3), st.data())
def test_texts_of_xml_come_back_as_written(values: list[str], data: st.DataObject) -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(len(values))}
    tools = XmlCalls({"f": {"properties": properties}})
    body = "".join(f"<parameter=p{i}>\n{value}\n</parameter>\n" for i, value in enumerate(values))
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    message = read_message(text, "never", tools)
    (call,) = message.tool_calls
    assert json.loads(call.arguments) == {f"p{i}": value for i, value in enumerate(values)}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert in_pieces(text, cuts, "never", tools) == parts(message)


def test_a_call_is_held_until_it_is_whole() -> None:
    reader = MessageReader("never", HERMES)
    assert reader.push("So: <tool") == [Text("content", "So:")], "white space may be that of a call"
    assert reader.push('_call>\n{"name": "f", "arguments": {"a": "</tool_call>') == []
    assert reader.push('"}}\n</tool') == []
    (call,) = reader.push("_call>")
    assert isinstance(call, ToolCall) and call.id.startswith("call_")
    assert (call.index, call.name, call.arguments) == (0, "f", '{"a": "</tool_call>"}') and reader.end() == []


def test_what_is_nested_too_deeply_is_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = f"<function=f>\n<parameter=list>\n{deep}\n</parameter>\n</function>"
    assert parts(read_message(text, "never", XML)) == (None, None, [("f", f'{{"list": "{deep}"}}')])
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    assert parts(read_message(text, "never", HERMES)) == (None, text, [])


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nso <tool_call>", "possible", "so <tool_call>", None),  # without an end
        ("so\n", "open", "so", None),
        ("<think>\n\n</think>\n\nx", "possible", None, "x"),
        ("x <think> y </think>", "possible", None, "x <think> y </think>"),
        ("<think>x</think>", "never", None, "<think>x</think>"),
    ],
)
def test_where_reasoning_begins_and_ends(text: str, thinking: Thinking, reasoning: str, content: str) -> None:
    assert parts(read_message(text, thinking, HERMES)) == (reasoning, content, [])


ARGUMENTS = '{"name": "f", "arguments": {"a": '
LONG_TEXTS: dict[str, tuple[Any, ...]] = {  # a format, how a text begins, what it repeats, and how it ends
    "a string that never closes": (HERMES, '<tool_call>{"x": "', "a <tool_call> {"),
    "openings in openings": (HERMES, "", "<tool_call>" + ARGUMENTS),
    "openings in the values of one that fails": (XML, "", "<function=f><parameter=n>", "</parameter> - </function>"),
    "calls that lack the end of their tag": (HERMES, "", '<tool_call>{"name": "f", "arguments": {}} - '),
    "parameters without an end": (XML, "", "<function=f>\n<parameter=text>\n"),
    "functions that lack the end of their tag": (XML, "", "<tool_call>\n<function=f>\n</function>\n - "),
    "a name that does not end": (XML, "<function=", "name "),
    "parameters that lack their ends": (XML, "<function=f><parameter=n>", "<parameter=n>"),
    "white space": (XML, "", "<tool_call> \n \n"),
}


@pytest.mark.parametrize("case", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_reading_is_linear(case: tuple[Any, ...]) -> None:
    """Twice the text is twice the work, whatever a model writes."""
    tools, begin, repeated, end = (*case, "")[:4]
    for size in (1, 7, None):
        work = [reading(tools, begin + repeated * n + end, size) for n in (40, 80)]
        assert work[1] < 2.3 * work[0], (size, work)


class _Measured:
    """A pattern that counts the characters over which it goes."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.work = 0

    def __getattr__(self, name: str) -> Any:
        def call(text: str, at: int = 0, *rest: Any) -> Any:
            found = getattr(self.pattern, name)(text, at, *rest)
            end = found.end() if isinstance(found, re.Match) else rest[0] if rest else len(text)
            self.work += 1 + end - at
            return found

        return call


def reading(tools: ToolFormat, text: str, size: int | None) -> int:
    """How much work it takes to read a text in pieces of a size: lines of code, and characters of patterns."""
    lines, measured = 0, list[_Measured]()

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if "runtime/chat" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        for module in (calls, reader_module):
            for name, value in [*vars(module).items()]:
                if isinstance(value, re.Pattern):
                    measured.append(_Measured(value))
                    patch.setattr(module, name, measured[-1])
        sys.settrace(count)
        try:
            in_pieces(text, range(size or len(text), len(text), size or len(text)), "never", tools)
        finally:
            sys.settrace(before)
    return lines + sum(each.work for each in measured)
