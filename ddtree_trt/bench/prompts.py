"""Prompts: JSONL files, the set that ships with the tiny pair, and the paper's datasets by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from ddtree_trt.bench.paper_datasets import PAPER_SETS, load_turns
from ddtree_trt.bench.settings import TINY, Shard
from ddtree_trt.errors import UsageError

Message = dict[str, str]

_T = TypeVar("_T")
_KINDS = ("prompt", "turns", "messages", "text", "token_ids")
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
    """The prompts of all specs, in their order.

    A spec is a JSONL file, `tiny`, the name of one of the paper's datasets, or NAME=FILE for a local copy of one.
    `limit` is the most prompts of each; None takes the paper's number of a dataset and all of a file.
    Raises UsageError for an unknown name or a line that is no prompt, MissingDependency without `datasets`.
    """
    prompts = [prompt for spec in specs for prompt in _load(spec, limit)]
    repeated = [p.id for p in prompts if sum(q.id == p.id for q in prompts) > 1] if len(specs) > 1 else []
    if repeated:
        raise UsageError(f"two prompt sets are called {repeated[0].rpartition('/')[0]!r}; rename one of the files")
    return prompts


def _load(spec: str, limit: int | None) -> list[BenchPrompt]:
    name, _, copy = spec.partition("=")
    if name in PAPER_SETS:
        return _number(name, [_chat(turns) for turns in load_turns(name, Path(copy) if copy else None, limit)])
    if spec == TINY:
        path = Path(str(resources.files("ddtree_trt").joinpath("assets/tiny/prompts.jsonl")))
        return _number(TINY, _spaced(read_jsonl(path), limit))
    path = Path(spec)
    if not path.is_file():
        known = ", ".join([TINY, *PAPER_SETS])
        raise UsageError(f"no prompts called {spec!r}: it is neither a file nor one of {known}")
    return _number(path.stem, _spaced(read_jsonl(path), limit))


def _spaced(items: list[_T], limit: int | None) -> list[_T]:
    """At most `limit` items, evenly spaced, since files are often sorted by domain."""
    if limit is None or len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _number(source: str, prompts: Iterable[tuple[Any, tuple[str, ...]]]) -> list[BenchPrompt]:
    return [BenchPrompt(f"{source}/{i}", source, opening, rest) for i, (opening, rest) in enumerate(prompts)]


def read_jsonl(path: Path) -> list[tuple[Any, tuple[str, ...]]]:
    """(opening, follow-ups) of each line. Raises UsageError naming a line that is no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts {path}: {error}") from error
    found = [_read_line(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"{path} has no prompts; expected JSON lines with {_SCHEMA}")
    return found


def _read_line(line: str, where: str) -> tuple[Any, tuple[str, ...]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    kinds = [k for k in _KINDS if k in row] if isinstance(row, dict) else []
    if len(kinds) != 1:
        raise UsageError(f"{where}: expected an object with {_SCHEMA}; found {line[:80]}")
    value = row[kinds[0]]
    if kinds[0] in ("prompt", "text") and isinstance(value, str) and value:
        return (value, ()) if kinds[0] == "text" else _chat([value])
    if kinds[0] == "turns" and _is_list(value, str):
        return _chat(value)
    if kinds[0] == "token_ids" and _is_list(value, int):
        return value, ()
    if kinds[0] == "messages" and _is_list(value, dict) and all(_is_message(m) for m in value):
        return [{"role": m["role"], "content": m["content"]} for m in value], ()
    raise UsageError(f"{where}: {kinds[0]} cannot be {json.dumps(value)[:60]}; expected {_SCHEMA}")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is kind for v in value)


def _is_message(message: Any) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _chat(turns: Sequence[str]) -> tuple[list[Message], tuple[str, ...]]:
    return [{"role": "user", "content": turns[0]}], tuple(turns[1:])


def select(prompts: Sequence[BenchPrompt], shard: Shard) -> list[BenchPrompt]:
    """The shard's prompts: every `count`-th one, so that every shard has prompts of every set."""
    return list(prompts[shard.index - 1 :: shard.count])


def digest(prompts: Sequence[BenchPrompt]) -> str:
    """sha256 over the prompts' content, by which a replay finds that prompts have changed."""
    text = json.dumps([asdict(p) for p in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
