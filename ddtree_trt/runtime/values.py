"""Kinds of values that requests hold, as annotations that pydantic checks: numbers of any library, texts, token ids."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any

from ddtree_trt.errors import UsageError
from ddtree_trt.reading import After, Before, Between

MAX_INTEGER = 2**31 - 1  # device kernels count in int32
_OWN = {int, float, bool, str, tuple, dict, type(None)}


def as_integer(value: Any) -> int | None:
    """An integer of any library as a Python int; None for everything else, booleans included."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def plain(value: Any) -> Any:
    """A number of any library as Python's own; everything else as it is."""
    if type(value) in _OWN or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:  # a Fraction beyond the floats
        return value


def several(value: Any) -> Any:
    """One value, several, or None for no values, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, str | Integral):
        return (plain(value),)
    try:
        if isinstance(value, Mapping | bytes | bytearray):
            raise TypeError
        return tuple(map(plain, value))
    except TypeError:
        raise ValueError("must be one value or a list of them") from None


def valid_text(text: str) -> str:
    """A text without unpaired surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be valid Unicode (character {error.start} is half of a surrogate pair)") from error
    return text


def check_text(name: str, text: str) -> None:
    """Raises UsageError, which names `name`, for a text that is not valid Unicode."""
    try:
        valid_text(text)
    except ValueError as error:
        raise UsageError(f"{name} {error}") from error


def _given(text: str) -> str:
    if not text:
        raise ValueError("must be a text that is not empty")
    return valid_text(text)


def _biases(value: Any) -> Any:
    """Biases by token id, which JSON has as text."""

    def token(key: Any) -> Any:
        return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10 else plain(key)

    return {token(key): plain(bias) for key, bias in value.items()} if isinstance(value, Mapping) else value


Count = Annotated[int, Between(0, MAX_INTEGER)]
Positive = Annotated[int, Between(1, MAX_INTEGER)]
Share = Annotated[float, Between(0, 1)]
Text = Annotated[str, After(_given)]
Texts = Annotated[tuple[Text, ...], Before(several)]
TokenIds = Annotated[tuple[Count, ...], Before(several)]
Biases = Annotated[dict[Count, Annotated[float, Between(-100, 100)]], Before(_biases)]
