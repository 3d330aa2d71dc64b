"""StructuredOutput, the constraint on a request's output, and the names it has in OpenAI's API and vLLM's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.reading import After, Before, check_fields
from ddtree_trt.runtime.values import Text, Texts, check_text

MAX_AFTER = 256  # characters, which are compared with the output at every token
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


def schema_text(schema: Any) -> str:
    """A schema as JSON text, its keys in the order given: that is the order of an object's properties in the output.

    `schema` is a dictionary, a boolean, or JSON text of one. Raises UsageError for anything else.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise UsageError(f"structured: a schema must be a JSON object or a boolean, not {shown(value)}")
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, allow_nan=False)
    except UsageError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"structured: the schema is no JSON, or nested too deeply: {error}") from None
    check_text("structured: a schema", text)
    return text


def _bounded(text: str) -> str:
    if len(text) > MAX_AFTER:
        raise ValueError(f"has {len(text)} characters, at most {MAX_AFTER} are taken; give its last ones")
    return text


Schema = Annotated[str | Mapping[str, Any] | bool, Before(schema_text)]


@dataclass(frozen=True)
class StructuredOutput:
    """What an output must be: exactly one of the first five is given.

    Every value is checked on construction, all but what the grammar library alone can judge. UsageError says what is
    wrong, in a sentence that begins with `structured`. Records can be compared and hashed.

    Attributes:
        json_schema: a JSON value that this schema allows; a dictionary, a boolean or JSON text, kept as JSON text.
        json_object: any JSON object.
        regex: a text that this regular expression matches as a whole, in the syntax of Rust's `regex` without anchors.
        choice: one of these texts.
        grammar: a text of this grammar, in llguidance's dialect of Lark or in GBNF.
        after: the constraint begins behind the first occurrence of this text in the output, for models that reason
            first; up to there nothing is constrained.
    """

    json_schema: Schema | None = None
    json_object: bool = False
    regex: Text | None = None
    choice: Texts = ()
    grammar: Text | None = None
    after: Annotated[Text, After(_bounded)] | None = None

    def __post_init__(self) -> None:
        if not (given := self._given()) or len(given) > 1:
            found = f"not {' and '.join(given)}" if given else "and none was given"
            raise UsageError(f"structured: exactly one of {', '.join(KINDS)} is needed, {found}")
        check_fields(self, "structured: ")

    def _given(self) -> list[str]:
        """The kinds that are given. False is a schema: that of no value."""
        values = {name: getattr(self, name) for name in KINDS}
        return [n for n, v in values.items() if v not in (None, False, (), []) or (n == "json_schema" and v is False)]

    @property
    def kind(self) -> str:
        return self._given()[0]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """The record of values by field name, or `json`; None is no value. Raises UsageError for an unknown name."""
        given = {("json_schema" if name == "json" else name): v for name, v in values.items() if v is not None}
        known = {field.name for field in dataclasses.fields(cls)}
        if others := [name for name in given if name not in known]:
            raise UsageError(f"structured: unknown name {shown(others[0])}; known are json, {', '.join(sorted(known))}")
        if values.get("json") is not None and values.get("json_schema") is not None:
            raise UsageError("structured: json and json_schema are the same; give one of them")
        return cls(**given)

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """A record, its values by name, or JSON of them, as a record. Raises UsageError."""
        if isinstance(value, StructuredOutput):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"structured is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise UsageError(f"structured must be a StructuredOutput or an object of its fields, not {shown(value)}")
        return cls.from_mapping(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.of)


STRUCTURED = "structured"


def _response_format(value: Any) -> StructuredOutput | None:
    """OpenAI's: text, json_object, or json_schema with the schema. A schema is kept to whether or not it is strict."""
    match value:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return StructuredOutput(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": schema, **named}, **rest} if not rest:
            if named.keys() <= {"name", "description", "strict"}:
                return StructuredOutput(json_schema=schema)
    raise UsageError(
        "structured: must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': "
        f"{{'name': ..., 'schema': ...}}}}, not {shown(value)}"
    )


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
