"""Constraints that strangers may send, usual ones and hostile ones, as a function of a seed."""

import json
import random
from collections.abc import Callable
from typing import Any

from fuzzing import damage, mutate_json
from random_schemas import random_schema

LETTERS = 'ab01 {}[]",.:<>\\néß日'


def body(seed: int) -> dict[str, Any]:
    """The body of a completion under a constraint."""
    rng = random.Random(seed)
    structured: dict[str, Any] = rng.choice((_schema, _schema, _regex, _regex, _grammar, _choice))(rng)
    if rng.random() < 0.25:
        structured["after"] = _after(rng)
    return {
        "prompt": f"What is {seed} + 2?",
        "structured_outputs": structured,
        "max_tokens": rng.choice((1, 4, 16)),
        "temperature": rng.choice((0, 0, 1, 5)),
        "seed": seed % 7,
        "n": rng.choice((1, 1, 1, 2)),
        "stream": rng.random() < 0.3,
        "method": rng.choice(("ar", "ddtree", "dflash", "auto")),
    }


def _size(rng: random.Random, most: int) -> int:
    """A number up to `most`, of any magnitude."""
    return round(most ** rng.random())


def _text(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(_size(rng, most)))


def _schema(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.4:
        return {"json": random_schema(rng)}
    if kind < 0.6:
        return {"json": mutate_json(json.dumps(random_schema(rng)), rng).decode("utf-8", "replace")}
    n, name = _size(rng, 3000), rng.choice(("a", "name_"))
    text = {"type": "string"}
    hostile: tuple[Callable[[], Any], ...] = (
        lambda: {"type": "string", "pattern": f"^{_expression(rng, 3)}$"},
        lambda: {"allOf": [{**text, "pattern": f"a{{{i + 1}}}"} for i in range(n % 300)]},
        lambda: {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(n % 12)]},
        lambda: {"type": "object", "properties": {f"{name}{i}": text for i in range(4 * n)}},
        lambda: {"type": "object", "required": [f"{name}{i}" for i in range(4 * n)]},
        lambda: {"enum": [f"{name}{i}" * (i % 9) for i in range(4 * n)]},
        lambda: {"anyOf": [{"properties": {"kind": {"const": i}}, "required": ["kind"]} for i in range(n)]},
        lambda: {"type": "integer", "multipleOf": n, "minimum": -(10 ** (n % 30)), "maximum": 10 ** (n % 30)},
        lambda: {"type": "string", "minLength": n, "maxLength": n * rng.choice((1, 2, 1000))},
        lambda: {"type": "array", "items": {"$ref": "#"}, "minItems": n},
        lambda: {
            "$defs": {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(n % 40)},
            "$ref": "#/$defs/d0",
        },
        lambda: {"$defs": {"a": {"anyOf": [text, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        lambda: '{"items":' * n + "{}" + "}" * n,
        lambda: {"type": "object", "patternProperties": {f"^{_expression(rng, 2)}$": text for _ in range(n % 9)}},
    )
    return {"json": rng.choice(hostile)()}


def _expression(rng: random.Random, depth: int) -> str:
    """A regular expression with nested repetitions of all sizes."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(("a", "b", ".", "[a-z]", "\\w", "\\d", "(?s:.)", "[^a]", "x*", "日", "(ab|ba)", "\\P{L}"))
    inner = _expression(rng, depth - 1)
    low, high = _size(rng, 1000), _size(rng, 1000)
    forms = (
        f"({inner}){{{low}}}",
        f"({inner}){{{min(low, high)},{max(low, high)}}}",
        f"({inner})*{_expression(rng, depth - 1)}",
        f"({inner}|{_expression(rng, depth - 1)})+",
        f"{inner}{_expression(rng, depth - 1)}?",
        f".*{inner}.{{{low % 60}}}",
    )
    return rng.choice(forms)


def _regex(rng: random.Random) -> dict[str, Any]:
    kind, n = rng.random(), _size(rng, 3000)
    if kind < 0.7:
        return {"regex": _expression(rng, rng.randint(1, 4))}
    forms = (
        lambda: damage(_expression(rng, 3).encode(), rng).decode("utf-8", "replace") or "(",
        lambda: "a" * (20 * n),
        lambda: "|".join(f"[ab]{{{2000 - i % 2000}}}{i}" for i in range(n % 500)) or "a",
        lambda: "(" * n + "a" + ")" * n,
        lambda: "|".join(_text(rng, 30).replace("\\", "") or "a" for _ in range(n)),
        lambda: "\\w|\\W" * n or "a",
        lambda: "(a{1000}){1000}",
    )
    return {"regex": rng.choice(forms)()}


def _grammar(rng: random.Random) -> dict[str, Any]:
    n = _size(rng, 3000)
    rules = "\n".join(f'a{i}: "x{i}" | a{rng.randrange(n)} "y"? a{(i + 1) % n}' for i in range(n))
    forms = (
        lambda: 'start: "<" word ("," word){1,2} ">"\nword: /[a-f]{1,3}/',
        lambda: 'root ::= "<" [a-f]+ root? ">"',
        lambda: f"start: a0\n{rules}",
        lambda: "start: start start | start |",
        lambda: f"start: a{{{n}}}\na: b{{{n}}} | /{_expression(rng, 2)}/\nb: /[a-z]/ a?",
        lambda: 'start: a\na: a a | "x" | "xx" |\n',
        lambda: f"start: A\nA: /{_expression(rng, 2)}/ & /{_expression(rng, 2)}/ & ~/{_expression(rng, 2)}/",
        lambda: f"start: %json {json.dumps(random_schema(rng))}",
        lambda: "start: " + "(" * n + '"a"' + ")" * n,
        lambda: _text(rng, 2000) or "start:",
        lambda: f"root ::= {'(' * n}[a-z]{')*' * n}",
    )
    return {"grammar": rng.choice(forms)()}


def _choice(rng: random.Random) -> dict[str, Any]:
    n = _size(rng, 11_000)
    forms = (
        lambda: [_text(rng, 20) for _ in range(n)],
        lambda: [f"number {i}" for i in range(n)],
        lambda: ["a" * i for i in range(n % 1500)],
        lambda: ["x" * 1000 + str(i) for i in range(n % 1200)],
    )
    return {"choice": rng.choice(forms)()}


def _after(rng: random.Random) -> str:
    forms = (
        lambda: rng.choice(LETTERS),
        lambda: "</think>",
        lambda: _text(rng, 300),
        lambda: "ab" * _size(rng, 150),
        lambda: "a" * _size(rng, 60_000),
    )
    return str(rng.choice(forms)())
