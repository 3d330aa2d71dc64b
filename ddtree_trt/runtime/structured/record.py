"""StructuredOutput, the constraint that a request's output has to satisfy, and the check of a value that states one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.values import Integer, Texts, check_text

MAX_CHARACTERS = 1 << 20  # of a schema, expression or grammar, and of the texts of a choice together
MAX_AFTER = 256  # characters
MAX_CHOICES = 10_000
MAX_TAGS = 1024
MAX_REPEATS = 1 << 16
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "tags")


@dataclass(frozen=True)
class Tag:
    """`begin`, a JSON value that `schema` allows, then `end`. A schema is kept as JSON text."""

    begin: str
    schema: str | Mapping[str, Any] | bool
    end: str

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            _check_string(f"structured: {name} of a tag", getattr(self, name))
        if not self.begin:
            raise UsageError("structured: begin of a tag is empty; give the text that opens it")
        object.__setattr__(self, "schema", schema_text("schema of a tag", self.schema))


@dataclass(frozen=True)
class StructuredOutput:
    """What an output must be: exactly one of the first six is given.

    Every value is checked on construction, all but what the grammar library alone can judge. UsageError says what is
    wrong, in a sentence that begins with `structured`. Records can be compared and hashed.

    Attributes:
        json_schema: a JSON value that this schema allows; a dictionary, a boolean or JSON text, kept as JSON text.
        json_object: any JSON object.
        regex: a text that this regular expression matches as a whole, in the syntax of Rust's `regex` without anchors.
        choice: one of these texts.
        grammar: a text of this grammar, in llguidance's dialect of Lark or in GBNF.
        tags: `at_least` to `at_most` (None: any number) of these tags, `separator` between them.
        after: the constraint begins behind the first occurrence of this text in the output, for models that reason
            first; up to there nothing is constrained.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    tags: tuple[Tag, ...] = ()
    at_least: int = 1
    at_most: int | None = None
    separator: str = ""
    after: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise UsageError(f"structured: json_object must be true or false, not {shown(self.json_object)}")
        self._keep("choice", Texts().check("structured: choice", self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if self.json_schema is False:
            given.insert(0, "json_schema")
        if len(given) != 1:
            found = f"not {' and '.join(given)}" if given else "and none was given"
            raise UsageError(f"structured: exactly one of {', '.join(KINDS)} is needed, {found}")
        if self.json_schema is not None:
            self._keep("json_schema", schema_text("json_schema", self.json_schema))
        for name in ("regex", "grammar", "after"):
            if (text := getattr(self, name)) is not None:
                _check_string(f"structured: {name}", text)
                if not text:
                    raise UsageError(f"structured: {name} is empty; give a text, or leave it out")
        if self.after is not None and len(self.after) > MAX_AFTER:
            raise UsageError(
                f"structured: after has {len(self.after)} characters, at most {MAX_AFTER} are taken; give its last ones"
            )
        if len(self.choice) > MAX_CHOICES:
            raise UsageError(f"structured: choice has {len(self.choice)} texts, at most {MAX_CHOICES} are taken")
        if (characters := sum(map(len, self.choice))) > MAX_CHARACTERS:
            raise UsageError(f"structured: choice has {characters} characters, at most {MAX_CHARACTERS} are taken")
        self._check_tags()

    def _check_tags(self) -> None:
        tags = tuple(self.tags) if isinstance(self.tags, list | tuple) else (self.tags,)
        self._keep("tags", tags)
        if wrong := next((tag for tag in tags if not isinstance(tag, Tag)), None):
            raise UsageError(f"structured: tags must be records of Tag, not {shown(wrong)}")
        if len(tags) > MAX_TAGS:
            raise UsageError(f"structured: there are {len(tags)} tags, at most {MAX_TAGS} are taken")
        _check_string("structured: separator", self.separator)
        counts = Integer(0, MAX_REPEATS)
        self._keep("at_least", counts.check("structured: at_least", self.at_least))
        if self.at_most is not None:
            self._keep("at_most", counts.check("structured: at_most", self.at_most))
            if self.at_most < max(self.at_least, 1):
                raise UsageError(f"structured: at_most {self.at_most} is below {max(self.at_least, 1)}")

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The one of the six that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """The record of values by field name, `json` being another name of `json_schema`; None stands for a value that
        is not given. Raises UsageError for an unknown name."""
        given = {("json_schema" if name == "json" else name): v for name, v in values.items() if v is not None}
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := [name for name in given if name not in known]:
            raise UsageError(
                f"structured: unknown name {shown(unknown[0])}; known are json, {', '.join(sorted(known))}"
            )
        if values.get("json") is not None and values.get("json_schema") is not None:
            raise UsageError("structured: json and json_schema are the same; give one of them")
        tags = given.get("tags", ())
        if isinstance(tags, list | tuple):
            given["tags"] = tuple(_tag(tag) for tag in tags)
        return cls(**given)


def _tag(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) != {"begin", "schema", "end"}:
        raise UsageError(f"structured: a tag has begin, schema and end, and this one {shown(dict(value))}")
    return Tag(**value)


def schema_text(name: str, schema: Any) -> str:
    """A schema as JSON text, its keys in the order given: that is the order of an object's properties in the output.

    `schema` is a dictionary, a boolean, or JSON text of one. Raises UsageError, which names `name`, for anything else.
    """
    try:
        if isinstance(schema, str):
            _check_string(f"structured: {name}", schema)
            schema = json.loads(schema)
        if isinstance(schema, Mapping):
            schema = dict(schema)
        elif not isinstance(schema, bool):
            raise UsageError(f"structured: {name} must be a JSON object or a boolean, not {shown(schema)}")
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except json.JSONDecodeError as error:
        raise UsageError(f"structured: {name} is not JSON: {error}") from error
    except RecursionError:
        raise UsageError(f"structured: {name} is nested too deeply; nest it less") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"structured: {name} cannot be written as JSON: {error}") from error
    _check_string(f"structured: {name}", text)
    return text


def _check_string(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{name} must be a text, not {shown(text)}")
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"{name} has {len(text)} characters, at most {MAX_CHARACTERS} are taken")
    check_text(name, text)


@dataclass(frozen=True)
class Structure:
    """The kind of values that the sampling parameter takes: a StructuredOutput, its values by name, or JSON of them."""

    range = "a constraint"

    def check(self, name: str, value: Any) -> StructuredOutput:
        if isinstance(value, StructuredOutput):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{name} is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must be a StructuredOutput or an object of its fields, not {shown(value)}")
        return StructuredOutput.from_mapping(value)
