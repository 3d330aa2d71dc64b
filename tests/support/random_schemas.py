"""Random JSON schemas whose values are of bounded size, for tests of structured output."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "size", "ok", "items", "a b", "kind", 'qu"ote', "äö", "x-1", "")
_PATTERNS = ("^[a-z]{1,4}$", "[0-9]{3}-[0-9]{2}", "^(red|green|blue)$", "^x{0,3}y$", "^\\d{1,5}$", '^[^\\n"]{2,6}$')


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema with nesting of at most `depth`."""
    simple = [_null, _boolean, _integer, _number, _string, _string, _enum, _const]
    nested = [_object, _object, _object, _array, _array, _tuple, _any_of, _all_of, _union, _reference]
    make = rng.choice(simple if depth == 0 else simple + 2 * nested)
    return make(rng, depth)


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-300, 300)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 7, 99, 5000])}
    if rng.random() < 0.3:
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice([-10.5, -1, 0, 0.25, 3])
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 1, 30])}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}
    if kind < 0.4:
        return {"type": "string", "format": rng.choice(["uuid", "ipv4"])}
    least = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 1, 5, 12])}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [1, -2.5, "a", 'q"\\', "日本", None, True, [1, "b"], {"k": 0}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([0, "c", False, None, [], {"a": [1, 2]}])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^[b-d]{1,2}$": random_schema(rng, 0)}
        schema |= {"required": names, "maxProperties": len(names) + 2}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.choice([0, 0, 1, 2])
    return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "minimum": rng.randint(-5, 5)}, {"maximum": rng.randint(5, 90)}]}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    """What pydantic makes of a union with a discriminator."""

    def member(kind: str) -> dict[str, Any]:
        properties = {"kind": {"const": kind, "type": "string"}, "value": random_schema(rng, depth - 1)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    return {"oneOf": [member("a"), member("b")]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """A list in a list in a list, by a reference to itself."""
    node = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    return node | {"items": random_schema(rng, 0)} if depth < 3 else {"$defs": {"node": node}, "$ref": "#/$defs/node"}
