"""How much longer a tokenizer's rules can make a text: those that rewrite a prompt before it is cut into tokens, and
those that rewrite the text of tokens. Rules whose replacements are replaced again can make terabytes of one letter."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_trt.reading import Fields, shown

# Bytes of one byte of text. Published tokenizers stay below 50: compatibility forms of Unicode, 11, each letter of them
# in lower case, 1.5, each space of them a mark of three bytes.
_MOST_GROWTH = 64.0
_MOST_RULES = 256
_LONGEST_REPLACEMENT = 1 << 12  # characters
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
    wrong = None
    if len(rules) > _MOST_RULES:
        wrong = f"has {len(rules)} rules, at most {_MOST_RULES} are supported"
    elif untyped := [
        rule for rule in rules if rule.get("type") is None
    ]:  # read by fields that other rules may have too
        wrong = f"has a rule without a type: {shown(untyped[0])}"
    elif (longest := max((len(_replacement(rule)) for rule in rules), default=0)) > _LONGEST_REPLACEMENT:
        wrong = f"has a replacement of {longest} characters, at most {_LONGEST_REPLACEMENT} are supported"
    elif (most := most_growth(rules)) > _MOST_GROWTH:
        wrong = f"may make {most:.3g} bytes of one byte of text, at most {_MOST_GROWTH:g} are supported"
    if wrong:
        raise tokenizer.fault(part, wrong)


def most_growth(rules: Sequence[Mapping[str, Any]]) -> float:
    """A bound of the bytes that rules, applied one after the other, make of one byte."""
    # Backwards: character → bytes that the rules from here on make of each of its bytes, and that of all others.
    weights: dict[str, float] = {}
    others = 1.0
    for rule in reversed(rules):
        if rule["type"] != "Replace":
            others, weights = _growth(rule) * max([others, *weights.values()]), {}
            continue
        made = sum(_bytes(c) * weights.get(c, others) for c in _replacement(rule))
        pattern = rule.get("pattern")
        found = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(found, str) and found:
            each = made / sum(map(_bytes, found))
            weights |= {c: max(weights.get(c, others), each) for c in found}
        else:  # an expression may match each character, and nothing behind it
            weights = {c: max(weight, made) + made for c, weight in weights.items()}
            others = max(others, made) + made
    return max([others, *weights.values()])


def _replacement(rule: Mapping[str, Any]) -> str:
    """The text that a rule writes; empty for one that states none."""
    text = rule.get({"Replace": "content", "Prepend": "prepend"}.get(str(rule["type"]), ""))
    return text if isinstance(text, str) else ""


def _rules(part: Any) -> list[dict[str, Any]]:
    """The rules in the order in which they are applied."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    parts = [each for name in ("normalizers", "decoders") if isinstance(part.get(name), list) for each in part[name]]
    return [rule for each in parts for rule in _rules(each)]


def _growth(rule: Mapping[str, Any]) -> float:
    """Most bytes of one that a rule without a replacement makes."""
    table = rule.get("precompiled_charsmap")
    if not isinstance(table, str):
        return _GROWTH.get(str(rule.get("type")), 1.0)
    try:
        data = base64.b64decode(table)
    except ValueError:
        return 1.0  # the tokenizer does not load
    # SentencePiece's table: the bytes of its index, the index, and the replacements, each ending in a zero.
    return max(1.0, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _bytes(character: str) -> int:
    return len(character.encode("utf-8", "surrogatepass"))
