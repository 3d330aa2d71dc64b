"""Random JSON schemas whose values are of bounded size, for tests of structured output."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_NAMES = ("name", "size", "ok", "items", "a b", "kind", 'qu"ote', "äö", "x-1", "")
_PATTERNS = ("^[a-z]{1,4}$", "[0-9]{3}-[0-9]{2}", "^(red|green|blue)$", "^x{0,3}y$", "^\\d{1,5}$", '^[^\\n"]{2,6}$')
_VALUES: tuple[Any, ...] = (
    1,
    -2.5,
    "a",
    'q"\\',
    "日本",
    None,
    True,
    [1, "b"],
    {"k": 0},
    0,
    "c",
    False,
    [],
    {"a": [1, 2]},
)
_Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> _Schema:
    """A schema with nesting of at most `depth`."""

    def below() -> _Schema:
        return random_schema(rng, depth - 1)

    def several() -> list[_Schema]:
        return [below() for _ in range(rng.randint(2, 3))]

    def member(kind: str) -> _Schema:
        """As pydantic makes those of a union with a discriminator."""
        properties = {"kind": {"const": kind, "type": "string"}, "value": below()}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    low, least = rng.randint(-300, 300), rng.choice([0, 0, 1, 3])
    highest = {rng.choice(["maximum", "exclusiveMaximum"]): low + rng.choice([1, 7, 99, 5000])}
    node: _Schema = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    simple: tuple[Callable[[], _Schema], ...] = (
        lambda: {"type": rng.choice(["null", "boolean"])},
        lambda: {"type": "integer", "minimum": low, **highest},
        lambda: {"type": "number", "minimum": low / 4, "maximum": low / 4 + rng.choice([0.5, 1, 30])},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12},
        lambda: {"type": "string", "format": rng.choice(["uuid", "ipv4"])},
        lambda: {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 1, 5, 12])},
        lambda: {"enum": rng.sample(_VALUES, rng.randint(1, 5))},
        lambda: {"const": rng.choice(_VALUES)},
    )
    nested: tuple[Callable[[], _Schema], ...] = (
        *3 * (lambda: _object(rng, depth),),
        *2 * (lambda: {"type": "array", "items": below(), "minItems": least, "maxItems": least + 2},),
        lambda: {"type": "array", "prefixItems": several(), "items": False, "minItems": rng.randint(0, 2)},
        lambda: {"anyOf": several()},
        lambda: {"allOf": [{"type": "integer", "minimum": rng.randint(-5, 5)}, {"maximum": rng.randint(5, 90)}]},
        lambda: {"oneOf": [member("a"), member("b")]},
        # A list in a list in a list, by a reference to itself.
        lambda: node | {"items": below()} if depth < 3 else {"$defs": {"node": node}, "$ref": "#/$defs/node"},
    )
    return rng.choice(simple if depth == 0 else simple + 2 * nested)()


def _object(rng: random.Random, depth: int) -> _Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: _Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^[b-d]{1,2}$": random_schema(rng, 0)}
        schema |= {"required": names, "maxProperties": len(names) + 2}
    return schema
