"""Kinds of values that sampling parameters take: which values each accepts, and the error for all others.

`check` of every kind takes a parameter's name and the value given, and returns the value to keep. It raises UsageError
with a sentence that begins with the name. `range` describes the accepted values in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from ddtree_trt.errors import UsageError, shown

MAX_INTEGER = 2**31 - 1  # bound of integers without a lower one: device kernels count in int32


class Kind(Protocol):
    """A kind of value."""

    @property
    def range(self) -> str: ...
    def check(self, name: str, value: Any) -> Any: ...


@dataclass(frozen=True)
class Integer:
    """An integer of any library, kept as a Python int."""

    low: int
    high: int = MAX_INTEGER

    @property
    def range(self) -> str:
        if self.high == MAX_INTEGER:
            return f"from {self.low}"
        bits = self.high.bit_length()
        return f"{self.low} to " + (f"2^{bits} − 1" if self.high == 2**bits - 1 else str(self.high))

    def check(self, name: str, value: Any) -> int:
        number = as_integer(value)
        if number is None:
            bounds = f"at least {self.low}" if self.high == MAX_INTEGER else f"from {self.low} to {self.high}"
            raise UsageError(f"{name} must be an integer {bounds}, not {shown(value)}")
        if self.high == MAX_INTEGER and not self.low <= number <= self.high:
            bounds = f"at least {self.low}" if number < self.low else f"at most {self.high}"
            raise UsageError(f"{name} must be {bounds}, not {shown(number)}")
        _check_range(name, number, self.low, self.high)
        return number


@dataclass(frozen=True)
class Number:
    """A finite number of any library: integers are kept as Python ints, all others as floats."""

    low: float
    high: float

    @property
    def range(self) -> str:
        return f"{_typographic(self.low)} to {_typographic(self.high)}"

    def check(self, name: str, value: Any) -> float:
        integer = as_integer(value)
        number = _as_float(value) if integer is None else integer
        if number is None:
            raise UsageError(f"{name} must be a number from {self.low} to {self.high}, not {shown(value)}")
        _check_range(name, number, self.low, self.high)
        return number


@dataclass(frozen=True)
class Flag:
    """True or false."""

    range = "true, false"

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, not {shown(value)}")
        return value


@dataclass(frozen=True)
class Choice:
    """A default, or one of several names."""

    default: str
    others: Collection[str]  # read whenever a value is checked, so that a table may have grown

    @property
    def range(self) -> str:
        return ", ".join(f"`{name}`" for name in (self.default, *self.others))

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in (self.default, *self.others):
            raise UsageError(f"{name} must be {self.default} or one of {', '.join(self.others)}, not {shown(value)}")
        return value


@dataclass(frozen=True)
class NodeCount:
    """`auto`, or an integer from 0."""

    range = "`auto`, from 0"

    def check(self, name: str, value: Any) -> int | str:
        if isinstance(value, str) and value == "auto":
            return value
        number = as_integer(value)
        if number is None or number < 0:
            raise UsageError(f'{name} must be "auto" or an integer at least 0, not {shown(value)}')
        return number


@dataclass(frozen=True)
class Texts:
    """Non-empty strings, one or several, kept as a tuple; None means no strings."""

    range = "strings"

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        texts = _as_tuple(name, value)
        if any(not isinstance(text, str) or not text for text in texts):
            raise UsageError(f"{name} must hold strings that are not empty, not {shown(texts)}")
        for text in texts:
            check_text(name, text)
        return texts


@dataclass(frozen=True)
class TokenIds:
    """Token ids, one or several, kept as a tuple; None means no ids."""

    range = "token ids"

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        given = _as_tuple(name, value)
        tokens = tuple(token for item in given if (token := as_integer(item)) is not None and token >= 0)
        if len(tokens) < len(given):
            raise UsageError(f"{name} must hold token ids, not {shown(given)}")
        return tokens


@dataclass(frozen=True)
class Biases:
    """Numbers by token id, kept as a copy: the caller may change the dictionary given."""

    low: float
    high: float

    @property
    def range(self) -> str:
        return f"token id → {_typographic(self.low)} to {_typographic(self.high)}"

    def check(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must map token ids to biases, not {shown(value)}")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token = as_integer(key)
            if token is None or token < 0:
                raise UsageError(f"{name}: {shown(key)} is not a token id")
            biases[token] = Number(self.low, self.high).check(f"{name}[{shown(token)}]", bias)
        return biases


def as_integer(value: Any) -> int | None:
    """An integer of any library as a Python int; None for everything else, booleans included."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def check_text(name: str, text: str) -> None:
    """Raises UsageError, which names `name`, for a text with unpaired surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair") from error


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """One value, several, or None for no values, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, str | Integral):
        return (value,)
    if isinstance(value, Mapping | bytes | bytearray) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be one value or a list of them, not {shown(value)}")
    try:
        return tuple(value)
    except TypeError:  # a NumPy array of no dimensions has __iter__, which raises
        raise UsageError(f"{name} must be one value or a list of them, not {shown(value)}") from None


def _as_float(value: Any) -> float | None:
    """A finite real number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a Fraction beyond the floats
        return None
    return number if math.isfinite(number) else None


def _check_range(name: str, number: float, low: float, high: float) -> None:
    if not low <= number <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {shown(number)}")


def _typographic(number: float) -> str:
    """A number with a typographic minus sign."""
    return f"{number}".replace("-", "−")
