"""How much longer a tokenizer's rules can make a text: those that rewrite a prompt before it is cut into tokens, and
those that rewrite the text of tokens. Rules whose replacements are replaced again can make terabytes of one letter."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_trt.reading import Fields, shown

# Bytes of one byte of text. Published tokenizers stay below 50: compatibility forms of Unicode, 11, each letter of them
# in lower case, 1.5, each space of them a mark of three bytes.
_MOST_GROWTH = 64.0
_GROWTH = {  # of the rules that state no replacement; others do not lengthen a text
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "ByteLevel": 2.0,
    "BertNormalizer": 9.0,  # decomposes, lowers, puts spaces around ideographs
    "BPEDecoder": 2.0,  # a mark of no characters becomes a space
    "CTC": 2.0,
}


def check_growth(tokenizer: Fields, part: str) -> None:
    """Raises the fields' error where the rules of a part of tokenizer.json, `normalizer` or `decoder`, may make more
    than `_MOST_GROWTH` bytes of one byte of text."""
    rules = _rules(tokenizer.optional(part, dict[str, Any]))
    if untyped := [rule for rule in rules if rule.get("type") is None]:  # read by fields that other rules may have too
        raise tokenizer.fault(part, f"has a rule without a type: {shown(untyped[0])}")
    if (most := most_growth(rules)) > _MOST_GROWTH:
        limit = f"at most {_MOST_GROWTH:g} are supported"
        raise tokenizer.fault(part, f"may make {most:.3g} bytes of one byte of text, {limit}")


def most_growth(rules: Sequence[Mapping[str, Any]]) -> float:
    """A bound of the bytes that rules, applied one after the other, make of one byte, each the most it can of what
    those before it made."""
    return math.prod(map(_growth, rules))


def _growth(rule: Mapping[str, Any]) -> float:
    kind, table = str(rule["type"]), rule.get("precompiled_charsmap")
    if kind == "Replace":
        made, pattern = _bytes(rule.get("content")), rule.get("pattern")
        found = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        # An expression may match each character, and nothing behind it.
        return max(1.0, made / found) if found else max(1.0, made) + made
    if kind == "Prepend":  # once in a text
        return max(1.0, _bytes(rule.get("prepend")) / _MOST_GROWTH)
    if not isinstance(table, str):
        return _GROWTH.get(kind, 1.0)
    try:
        data = base64.b64decode(table)
    except ValueError:
        return 1.0  # the tokenizer does not load
    # SentencePiece's table: the bytes of its index, the index, and the replacements, each ending in a zero.
    return max(1.0, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _rules(part: Any) -> list[dict[str, Any]]:
    """The rules in the order in which they are applied."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    parts = [each for name in ("normalizers", "decoders") if isinstance(part.get(name), list) for each in part[name]]
    return [rule for each in parts for rule in _rules(each)]
