"""Prompts from JSON Lines, and the set that ships with the tiny pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ddtree_trt.bench.settings import TINY
from ddtree_trt.errors import UsageError

Message = dict[str, str]

_SCHEMA = (
    'one of "prompt" (a user\'s message), "turns" (a user\'s messages, answered one by one), "messages" (a chat '
    'of {role, content}), "text" (continued as it is), "token_ids"'
)


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation. Every turn is measured as a request of its own."""

    id: str  # source/number
    source: str
    opening: str | list[Message] | list[int]  # text as it is, a chat, or token ids
    follow_ups: tuple[str, ...] = ()  # the user's later messages


def load_prompts(specs: Sequence[str], limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of all specs, each a file or `tiny`; of each at most `limit`, evenly spaced, since files are often
    sorted by domain. Raises UsageError for an unknown name, and for a line that is no prompt."""
    found: dict[str, BenchPrompt] = {}
    for spec in specs:
        path = Path(str(resources.files("ddtree_trt") / "assets/tiny/prompts.jsonl")) if spec == TINY else Path(spec)
        if not path.is_file():
            raise UsageError(f"no prompts called {spec!r}: it is neither a file nor {TINY}")
        source, rows = TINY if spec == TINY else path.stem, _read(path)
        count = min(limit or len(rows), len(rows))
        for number in range(count):
            prompt = BenchPrompt(f"{source}/{number}", source, *rows[number * len(rows) // count])
            if prompt.id in found:
                raise UsageError(f"two prompt sets are called {source!r}; rename one of the files")
            found[prompt.id] = prompt
    return list(found.values())


def _read(path: Path) -> list[tuple[Any, tuple[str, ...]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts {path}: {error}") from error
    found = [_read_line(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"{path} has no prompts; expected JSON lines with {_SCHEMA}")
    return found


def _read_line(line: str, where: str) -> tuple[Any, tuple[str, ...]]:
    """(opening, follow-ups)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    kinds = ("prompt", "turns", "messages", "text", "token_ids") if isinstance(row, dict) else ()
    match [(kind, row[kind]) for kind in kinds if kind in row]:
        case [("prompt", str(text))] if text:
            return [{"role": "user", "content": text}], ()
        case [("text", str(text))] if text:
            return text, ()
        case [("turns", [str(first), *rest])] if all(isinstance(turn, str) for turn in rest):
            return [{"role": "user", "content": first}], tuple(rest)
        case [("token_ids", [_, *_] as ids)] if all(type(token) is int for token in ids):
            return ids, ()
        case [("messages", [_, *_] as chat)] if all(map(_is_message, chat)):
            return [{"role": message["role"], "content": message["content"]} for message in chat], ()
    raise UsageError(f"{where}: expected an object with {_SCHEMA}; found {line[:80]}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
