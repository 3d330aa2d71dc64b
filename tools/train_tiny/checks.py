"""Whether an answer is right."""

from __future__ import annotations

from typing import Any

from .settings import EOS


def has_in_order(text: str, facts: list[str]) -> bool:
    """Every fact occurs after the one before."""
    place = 0
    for fact in facts:
        found = text.find(fact, place)
        if found < 0:
            return False
        place = found + len(fact)
    return True


def passes_tests(source: str, name: str, tests: list[list[Any]]) -> bool:
    """Run an answer of the tiny target, which can only write small pure functions, against its tests."""
    scope: dict[str, Any] = {}
    try:
        exec(compile(source, "answer", "exec"), scope)
        return all(repr(scope[name](*arguments)) == expected for arguments, expected in tests)
    except Exception:
        return False


def is_right(row: dict[str, Any], text: str) -> bool:
    """Judge `text` by a line of prompts.jsonl.

    math: the last line is the expected number. code: all tests pass. chat: an expected value that starts with "=" is
    the whole answer; otherwise it occurs, all of "facts" occur in order, and all of "also" occur.
    """
    if row["domain"] == "math":
        return text.strip().split("\n")[-1] == f"Answer: {row['expected']}"
    if row["domain"] == "code":
        return passes_tests(text, row["name"], row["tests"])
    expected: str = row["expected"]
    if expected.startswith("="):
        return text.strip() == expected[1:].strip()
    padded = f" {text}"
    facts = row.get("facts", [expected])
    return expected in padded and has_in_order(padded, facts) and all(fact in padded for fact in row.get("also", []))


def is_ended(ids: list[int]) -> bool:
    return bool(ids) and ids[-1] == EOS
