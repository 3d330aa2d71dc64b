"""Files made wrong at random: JSON documents by their structure or their bytes, safetensors headers among them.

Every mutation comes from a `random.Random`, so that a seed names a case.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# What `json.dumps` would not write: put into the text in place of a marker.
_RAW = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e400", "01", "'x'", "", '"\\ud800"', "9" * 5000, "1" + "0" * 400),
    *("[" * 100_000, "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 1 << 31, 1 << 63, 10_000_000, -0.0, 0.5, 1e300, 1e-300),
    *("", "x", "0", "\x1b[2J\nrm -rf ~; $(x)", "../../etc/passwd", "z" * 100_000),
    *([], [[]], [0], [-1, 1 << 40], ["x"] * 1000, {}, {"x": {"y": [1]}}),
)
_MARK = "@raw@"


def mutate_json(text: str, rng: random.Random) -> bytes:
    """The document with one to three mutations of its structure, or with damaged bytes."""
    if rng.random() < 0.15:
        return damage(text.encode(), rng)
    document, raw = json.loads(text), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = _place(document, rng)
        if holder is None:
            continue
        kind, value = rng.random(), holder[key]
        if kind < 0.15:
            del holder[key]
        elif kind < 0.25 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "a\nb", "rope_theta", str(key) + "_"))] = copy.deepcopy(value)
        elif kind < 0.5:
            raw.append(rng.choice(_RAW))
            holder[key] = f"{_MARK}{len(raw) - 1}"
        elif kind < 0.6 and isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = rng.choice((-value, value * 1000, value + 1, float(value), [value]))
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    text = json.dumps(document)
    for i, piece in enumerate(raw):
        text = text.replace(f'"{_MARK}{i}"', piece)
    if rng.random() < 0.05:
        text = text.replace("{", '{"twin": 1, "twin": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


# What stands in place of a value of its kind and cannot be right.
WRONG: dict[type, list[Any]] = {
    **{bool: [1, "x"], int: ["8", 8.5, True, -1, 10**30], float: ["x", True, -1.0, 10**400]},
    **{str: [5, ["x"]], list: [5, {}], dict: [[1], 5], type(None): [[7]]},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of a document, by the keys that lead to it."""
    if path:
        yield path, value
    for key, below in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(below, (*path, key))


def with_value(document: Any, place: Sequence[Any], value: Any) -> Any:
    """A copy of a document with another value there."""
    changed = inner = copy.deepcopy(document)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def place_name(place: Sequence[Any]) -> str:
    """As messages name it: near.verify[0]."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)[1:]


def _place(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A random entry of a random container, the upper ones more often: (container, key)."""
    holder = document
    while isinstance(holder, dict | list) and holder:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        below = holder[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.3:
            return holder, key
        holder = below
    return None, None


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, a piece cut out, or bytes put in."""
    changed = bytearray(data)
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 100))
    match rng.randrange(4):
        case 0:
            for _ in range(size):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at : at + size]
        case 2:
            changed[at:at] = rng.randbytes(size)
        case _:
            del changed[at:]
    return bytes(changed)


def mutate_weights(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, or other bytes behind it."""
    length = struct.unpack("<Q", data[:8])[0]
    header, values, kind = data[8 : 8 + length], data[8 + length :], rng.random()
    if kind < 0.1:
        lengths = (0, 1, length - 1, length + 1, len(data), 1 << 40, (1 << 64) - 1)
        return struct.pack("<Q", rng.choice(lengths)) + data[8:]
    if kind < 0.2:
        return data + rng.randbytes(rng.choice((1, 8, 4096)))
    if kind < 0.3:
        return data[: rng.randrange(len(data))]
    header = mutate_json(header.decode(), rng)
    return struct.pack("<Q", len(header)) + header + values


def linked_copy(source: Path, destination: Path) -> Path:
    """A directory with a link to every file of another: one of them can then be replaced."""
    destination.mkdir(parents=True)
    for path in source.iterdir():
        (destination / path.name).symlink_to(path)
    return destination
