"""Other names of the sampling parameter `structured`: those of OpenAI's API and of vLLM, now and earlier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.structured.record import StructuredOutput

STRUCTURED = "structured"


def _response_format(value: Any) -> StructuredOutput | None:
    """OpenAI's: text, json_object, or json_schema with the schema. A schema is kept to whether or not it is strict."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    allowed = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in allowed:
        raise UsageError(f"structured: type must be one of {', '.join(allowed)}, not {shown(value)}")
    if extra := [name for name in value if name not in allowed[kind]]:
        raise UsageError(f"structured: a format of type {kind!r} has no {shown(extra[0])}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    named = value.get("json_schema")
    if not isinstance(named, Mapping) or named.get("schema") is None:
        raise UsageError("structured: json_schema must be an object with a schema")
    if extra := [name for name in named if name not in ("name", "description", "schema", "strict")]:
        raise UsageError(f"structured: json_schema has no {shown(extra[0])}")
    return StructuredOutput(json_schema=named["schema"])


ALIASES: Mapping[str, Callable[[Any], StructuredOutput | None]] = {
    "structured_outputs": StructuredOutput.of,
    "response_format": _response_format,
    "guided_json": lambda value: StructuredOutput(json_schema=value),
    "guided_regex": lambda value: StructuredOutput(regex=value),
    "guided_choice": lambda value: StructuredOutput(choice=value),
    "guided_grammar": lambda value: StructuredOutput(grammar=value),
}


def given_name(values: Mapping[str, Any]) -> str | None:
    return next((name for name in (STRUCTURED, *ALIASES) if values.get(name) is not None), None)


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, with `structured` in place of its other names.

    Raises UsageError for a value that is not one, and for two constraints; it begins with the name given.
    """
    result = {name: value for name, value in values.items() if name not in ALIASES}
    for name in ALIASES:
        if values.get(name) is None:
            continue
        try:
            structured = ALIASES[name](values[name])
        except UsageError as error:
            raise UsageError(name + str(error).removeprefix(STRUCTURED)) from error
        if structured is None:
            continue
        if result.get(STRUCTURED) is not None:
            raise UsageError(f"{name} is a second constraint on the output; give one")
        result[STRUCTURED] = structured
    return result
