"""Constraints on the output as options of `ddtree-trt run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Cli

SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}


@pytest.fixture
def text(cli: Cli, tiny_engine: Path) -> Any:
    def text(*options: object) -> str:
        code, out, err = cli("run", tiny_engine, "-p", "cards?", "--json", "--max-tokens", 200, *options)
        assert code == (2 if err else 0)
        return err or str(json.loads(out)["outputs"][0]["text"])

    return text


def test_every_form_is_an_option(text: Any, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "x" "y"')
    jsonschema.validate(json.loads(text("--json-schema", schema)), SCHEMA)
    jsonschema.validate(json.loads(text("--json-schema", json.dumps(SCHEMA))), SCHEMA)
    assert text("--json-object").startswith("{")
    assert text("--choice", "few", "--choice", "many") in ("few", "many")
    assert re.fullmatch("[a-c]{4}", text("--regex", "[a-c]{4}"))
    assert text("--grammar", grammar) == text("--grammar", 'start: "x" "y"') == "xy"


def test_refusals(text: Any, tmp_path: Path) -> None:
    assert "--regex and --choice are two constraints on the output; give one" in text("--regex", "a", "--choice", "b")
    missing = text("--json-schema", tmp_path / "none.json")
    assert "cannot be read (No such file or directory); name a file, or give the text" in missing
    assert "structured: regex '(a' cannot be used" in text("--regex", "(a")
    for compared in ([], ["--compare"]):
        late = text("--regex", "[0-9]{12}(a{1000}){1000}", *compared)
        assert late.startswith("error: structured: the output could not be matched") and "max_lexer_states" in late
