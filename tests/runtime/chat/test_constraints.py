"""Constraints for calls: the grammar library allows what the parsers read as calls of the schema, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engine_builds import PACKAGED

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.chat.calls import BareJson, TaggedJson, ToolFormat, XmlCalls
from ddtree_trt.runtime.chat.constraints import constraint as constraint_of
from ddtree_trt.runtime.chat.constraints import literal
from ddtree_trt.runtime.chat.parsers import ToolParser
from ddtree_trt.runtime.chat.reader import read_message
from ddtree_trt.runtime.chat.tools import read_use
from ddtree_trt.runtime.structured.compiler import GrammarCompiler
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.runtime.text.codec import TextCodec

VALUE = {"$ref": "#/$defs/value"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "g.h"}},
]


@cache
def compiler() -> tuple[TextCodec, GrammarCompiler]:
    codec = TextCodec(PACKAGED / "tokenizer", {})
    return codec, GrammarCompiler(codec.tokenizer.backend_tokenizer.to_str, len(codec.tokenizer), frozenset({2}))


def allows(constraint: StructuredOutput, text: str) -> bool:
    """Whether the whole text satisfies the constraint from its beginning on, and may end there."""
    codec, grammars = compiler()
    ids = [*codec.encode(text), 2]
    return grammars.matcher(replace(constraint, after=None), frozenset({2})).allowed_length(ids) == len(ids)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def llama(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def coder(name: str, arguments: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


Write = Callable[[str, dict[str, Any]], str]
FORMATS: dict[ToolParser, tuple[Write, str, ToolFormat]] = {
    "hermes": (hermes, "\n", TaggedJson()),
    "llama3_json": (llama, "; ", BareJson()),
    "qwen3_coder": (coder, "\n", XmlCalls(read_use(TOOLS, None, None).schemas)),
}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("f", {"text": "a\nb </div> <x", "n": -3, "unit": "f"}),
    ("f", {"text": "", "unit": "c"}),
    ("g.h", {}),
]
BAD: list[tuple[str, dict[str, Any]]] = [("f", {"n": 3}), ("f", {"text": "x", "n": "3x"}), ("f", {"text": "x", "z": 1})]
BAD += [("other", {}), ("f", {"text": "x", "unit": "k"})]


@pytest.mark.parametrize("name", FORMATS)
def test_what_must_be_a_call(name: ToolParser) -> None:
    write, between, tools = FORMATS[name]
    constraint = constraint_of(name, read_use(TOOLS, "required", None), "never")
    assert constraint is not None and constraint.after is None
    whole = between.join(write(*call) for call in GOOD)
    assert allows(constraint, whole)
    read = read_message(whole, "never", tools)
    assert [(c.name, json.loads(c.arguments)) for c in read.tool_calls] == GOOD and read.content is None
    for call in BAD:
        assert not allows(constraint, write(*call)), call
    for text in ("", "Hello", whole + " so", whole[:-1]):
        assert not allows(constraint, text)
    one = constraint_of(name, read_use(TOOLS, "required", False), "never")
    assert one is not None and allows(one, write(*GOOD[0])) and not allows(one, whole)
    named = constraint_of(name, read_use(TOOLS, {"type": "function", "function": {"name": "g.h"}}, None), "open")
    assert named is not None and named.after == "</think>"
    assert allows(named, write("g.h", {})) and not allows(named, write("f", {"text": "x"}))


@pytest.mark.parametrize("name", FORMATS)
def test_what_may_be_a_call(name: ToolParser) -> None:
    """Free up to the first call's opening, then calls; free altogether where no tool is strict."""
    write, between, _ = FORMATS[name]
    constraint = constraint_of(name, read_use(TOOLS, "auto", None), "possible")
    assert constraint is not None and constraint.after
    whole = between.join(write(*call) for call in GOOD)
    assert whole.startswith(constraint.after) and allows(constraint, whole.removeprefix(constraint.after))
    for call in BAD:
        assert not allows(constraint, write(*call).removeprefix(constraint.after)), call
    loose = [{"type": "function", "function": {**t["function"], "strict": False}} for t in TOOLS]  # type: ignore[dict-item]
    assert constraint_of(name, read_use(loose, "auto", None), "possible") is None


def test_special_tokens_in_a_call_stand_for_themselves() -> None:
    assert literal('a</x>b"<|y|>', ["</x>", "<|y|>"]) == '"a" </x> "b\\"" <|y|>'
    assert literal("é", []) == '"é"' and literal("", ["<x>"]) == '""'
    for name in FORMATS:
        special = constraint_of(name, read_use(TOOLS, "required", None), "never", ["<tool_call>", "</tool_call>"])
        assert special is not None and special.grammar is not None
        assert ('"<tool_call>' in special.grammar, '</tool_call>"' in special.grammar) == (False, False)


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize("kinds", [{}, {"type": ["object", "null"]}, {"type": "integer"}, {"type": ["null", "array"]}])
def test_arguments_are_objects_whatever_their_schema_allows(name: ToolParser, kinds: dict[str, Any]) -> None:
    write: Any = FORMATS[name][0]
    schema = {**kinds, "properties": {"q": {"$ref": "#/$defs/q"}}, "required": ["q"], "$defs": {"q": {"const": 1}}}
    constraint = constraint_of(name, read_use(strict(schema), "required", None), "never")
    assert constraint is not None
    if "integer" in kinds.values() or "array" in kinds.get("type", ()):
        with pytest.raises(UsageError, match="nsatisfiable"):
            compiler()[1].check(constraint)
    else:
        assert allows(constraint, write("f", {"q": 1})) and not allows(constraint, write("f", {"q": 2}))
        assert not any(allows(constraint, write("f", value)) for value in (5, None, [5], "x"))


def strict(parameters: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


NUMBER, LISTED = {"type": "integer", "title": "N"}, {"$ref": "#/$defs/unit", "description": "which"}
NULL, TEXT = {"type": "null"}, {"type": "string"}
HELD: list[tuple[dict[str, Any], list[Any], list[str]]] = [  # schema of a value, values, texts that are none
    (VALUE, [3], ["x", "3x", '"3"']),
    ({"allOf": [VALUE], "default": 3}, [3], ["x"]),
    ({"anyOf": [VALUE, NULL]}, [3, None], ["x"]),
    ({"type": "array", "items": VALUE}, [[1, 2]], ["[true]"]),
    (LISTED, ["c", "3"], ["k", "c "]),
    ({"anyOf": [LISTED, NULL, {"type": "boolean"}]}, ["c", None, True], ["k", "4"]),
    ({"anyOf": [TEXT, NULL]}, ["x", None, "a</b>\n\n", ""], ["x</parameter>\n<parameter=v>\n3", "</function>"]),
    ({}, ["x", ["y"], {"z": 3}], []),
    ({"type": "array", "items": TEXT}, [["</parameter>\n<parameter=v>", "</function>"], []], ["x"]),
    ({"enum": [{"a": "<parameter=z>"}, ["</function>\n</tool_call>"]]}, [{"a": "<parameter=z>"}], ["{}"]),
]


@pytest.mark.parametrize(("of_value", "values", "others"), HELD)
def test_xml_values_satisfy_their_schema(of_value: Any, values: list[Any], others: list[str]) -> None:
    """References are followed, by the constraint and by who reads the call."""
    defs = {"value": NUMBER, "unit": {"enum": ["c", "3"]}}
    arguments = {"type": "object", "properties": {"v": of_value}, "required": ["v"]}
    for schema in ({**arguments, "$defs": defs}, {"$ref": "#/$defs/all", "$defs": {**defs, "all": arguments}}):
        use = read_use(strict(schema), "required", None)
        constraint = constraint_of("qwen3_coder", use, "never")
        assert constraint is not None and not allows(constraint, coder("f", {}))
        for value in values:
            text = coder("f", {"v": value})
            (call,) = read_message(text, "never", XmlCalls(use.schemas)).tool_calls
            assert allows(constraint, text) and json.loads(call.arguments) == {"v": value}
        assert not [text for text in others if allows(constraint, coder("f", {"v": text}))]


NOT_HELD: list[tuple[dict[str, Any], str]] = [
    *(({**TEXT, key: value}, key) for key, value in {"pattern": "^[0-9]+$", "minLength": 2, "format": "date"}.items()),
    ({**TEXT, "allOf": [{"maxLength": 3}]}, "allOf"),
    ({**LISTED, "maxLength": 3}, r"\$ref, maxLength"),
    ({"$ref": "#/$defs/none"}, "parameter 'v', which has no schema"),
    ({"anyOf": [TEXT, {"type": "integer", "minimum": 5}]}, "a choice of any text"),
    ({"enum": ["1", 2]}, "the value '1' of parameter 'v', which would be read as another"),
    ({"anyOf": [TEXT] * 200}, "or more than 100"),
    ({"type": "array", "items": {"$ref": "#"}}, 'the reference "#"'),
]


OF_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"x>y": TEXT}}, "the name 'x>y'"),
    ({"properties": {}, "required": ["z"]}, "'z', which it requires and does not describe"),
    ({"additionalProperties": TEXT}, "additionalProperties"),
    ({"properties": {"v": {}}, "required": "v"}, "required that is no list"),
    ({"properties": {"v": TEXT}, "minProperties": 1}, "minProperties"),
    ({"properties": {str(i): {"enum": [i, "x" * 20_000]} for i in range(60)}}, "its size"),
    ({"$ref": "#/$defs/none"}, r"a \$ref that leads to no schema"),
]


REFUSED = [({"properties": {"v": of_value}, "$defs": {"unit": {"enum": ["c"]}}}, text) for of_value, text in NOT_HELD]
REFUSED += OF_ARGUMENTS


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_xml_calls_cannot_be_held_to_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"tools: calls of f, .* because of .*{message}.*; leave that out, or"):
        constraint_of("qwen3_coder", read_use(strict(schema), None, None), "never")


def test_parameters_of_which_a_schema_says_nothing_have_any_names() -> None:
    use = read_use(strict({"type": "object"}), "required", None)
    constraint = constraint_of("qwen3_coder", use, "never")
    assert constraint is not None and allows(constraint, coder("f", {"any": "x", "thing": 5}))
