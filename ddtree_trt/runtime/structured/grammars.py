"""Constraints as grammars of llguidance: a JSON schema, an expression or a Lark text in the library's JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ddtree_trt.runtime.structured.record import StructuredOutput, Tag

# White space between two tokens of JSON: bounded, because a model that repeats itself would never come to an end.
WHITESPACE = r" |\n {0,20}|\n\t{0,8}"
DEFAULTS = {"whitespace_pattern": WHITESPACE}


def grammar_text(structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """The grammar as the library takes it. `special_tokens`: ids of the tokens that have a text only in grammars.

    Raises ValueError for a grammar whose notation is not understood.
    """
    from llguidance import LLMatcher, grammar_from

    if structured.grammar is not None:
        return str(grammar_from("grammar", structured.grammar))
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice:
        # One terminal: the lexer makes a trie of its texts, while the parser would take a row for each of them.
        texts = " | ".join(literal(text, {}) for text in structured.choice)
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    if structured.tags:
        return LLMatcher.grammar_from_lark(_tags_lark(structured, special_tokens))
    schema = structured.json_schema if isinstance(structured.json_schema, str) else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_defaults(schema)))


def _with_defaults(schema: Any) -> dict[str, Any] | bool:
    """A schema's JSON text as an object with our options, over which its own `x-guidance` stand."""
    value = json.loads(schema)
    if value is True:
        value = {}
    if isinstance(value, dict):
        own = value.get("x-guidance", {})
        value["x-guidance"] = {**DEFAULTS, **own} if isinstance(own, dict) else own
    return value


def _tags_lark(structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    lines = [f"tag_{i}: {_tag_body(tag, special_tokens)}" for i, tag in enumerate(structured.tags)]
    lines.append("tag: " + " | ".join(f"tag_{i}" for i in range(len(structured.tags))))
    # The first tag has no separator in front of it.
    most = "" if structured.at_most is None else str(structured.at_most - 1)
    separator = literal(structured.separator, special_tokens)
    following = f"({separator} tag){{{max(structured.at_least - 1, 0)},{most}}}" if most != "0" else ""
    some = f"tag {following}"
    lines.insert(0, f"start: {some}" + (' | ""' if structured.at_least == 0 else ""))
    return "\n".join(lines)


def _tag_body(tag: Tag, special_tokens: Mapping[str, int]) -> str:
    schema = json.dumps(_with_defaults(tag.schema))
    return f"{literal(tag.begin, special_tokens)} %json {schema} {literal(tag.end, special_tokens)}"


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text in Lark; the names of special tokens in it stand for these tokens."""
    names = sorted(filter(None, special_tokens), key=len, reverse=True)  # the longest of those at one place
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    written = (
        f"<[{special_tokens[part]}]>" if place % 2 else json.dumps(part, ensure_ascii=False)
        for place, part in enumerate(parts)
        if part
    )
    return " ".join(written) or '""'
