"""Tokenizers whose rules lengthen a text without bound are refused at build; published ones are not."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, make_pair
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from ddtree_trt.build.checkpoint.tokenizer import check_growth, most_growth, open_tokenizer
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Fields, Source


def rule(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def check(*rules: Any, part: str = "normalizer") -> None:
    data = {part: {"type": "Sequence", f"{part}s": list(rules)}}
    check_growth(Fields(data, Source("tokenizer.json", CheckpointError, "fetch it again")), part)


def table(*replacements: bytes) -> dict[str, Any]:
    """A table of SentencePiece with an index of no entries."""
    data = struct.pack("<I", 0) + b"".join(each + b"\0" for each in replacements)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}


@pytest.mark.parametrize(
    "rules",
    [
        [{"type": "Prepend", "prepend": "▁"}, rule(" ", "▁")],
        [{"type": "NFKC"}, {"type": "Lowercase"}, rule(" ", "▁")],
        [BERT],
        [table(b"1/2", b"EUR", b"..."), {"type": "StripAccents"}, rule(" ", "▁")],
        [rule("``", '"'), rule("…", "..."), rule("½", "1/2"), rule("€", "EUR"), rule("™", "(tm)"), rule("\t", " " * 8)],
    ],
)
def test_those_of_published_tokenizers_are_taken(rules: list[Any]) -> None:
    check(*rules)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([rule("h", "h" * 1000)] * 4, "normalizer may make 1e+12 bytes of one byte of text, at most 64"),
        ([rule("a", "bb"), rule("b", "cccc"), rule("c", "d" * 9)], "may make 72 bytes"),
        ([rule(".", "x" * 40, "Regex")], "may make 80 bytes"),
        ([{"type": "NFKD"}] * 2, "may make 121 bytes"),
        ([{"type": "Prepend", "prepend": "x" * 5000}], "may make 78.1 bytes"),
        ([{"pattern": {"String": "h"}, "content": "hh"}], "has a rule without a type"),
    ],
)
def test_those_that_grow_a_text_without_bound_are_refused(rules: list[Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check(*rules)
    assert words in str(caught.value)


RULES = st.builds(rule, st.text("ab", max_size=2), st.text("ab ", max_size=3), st.sampled_from(["String", "Regex"]))


@given(st.lists(RULES, max_size=4), st.text("ab ", max_size=12))
def test_the_bound_holds(rules: list[dict[str, Any]], text: str) -> None:
    """Compared with the rules applied. An expression may match once more, behind the last character."""
    applied = text
    for each in rules:
        ((kind, pattern),) = each["pattern"].items()
        replace = normalizers.Replace(Regex(pattern) if kind == "Regex" else pattern, each["content"])
        applied = replace.normalize_str(applied)
    assert len(applied) <= most_growth(rules) * (len(text) + 1)


def test_a_build_reads_files_as_large_as_published_ones(tmp_path: Path) -> None:
    """Qwen3's and Llama 3's have 9 to 11 MB."""
    target, _ = make_pair(tmp_path)
    with (target / "tokenizer.json").open("a") as file:
        file.write(" " * (48 << 20))
    assert open_tokenizer(target, target, 1 << 20).get_vocab()


def test_a_build_refuses_one(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    edit_json(target / "tokenizer.json", decoder=rule("t", "t" * 100))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder may make 100 bytes of one byte"):
        compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=tmp_path / "engine"))
