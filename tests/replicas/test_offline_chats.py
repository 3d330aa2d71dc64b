"""Offline runs of chats with tools, by parsers that the command names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, in_this_process
from dictation import with_template

PLAIN = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}:"  # says no format
COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["plates", "cards"]}, "trays": {"type": "integer", "maximum": 99}},
            "required": ["thing", "trays"],
            "additionalProperties": False,
        },
    },
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "There are 8 trays with 41 plates."}]}
REQUESTS: list[dict[str, Any]] = [
    {"custom_id": "call", **CHAT, "tools": [COUNT], "tool_choice": "required", "parallel_tool_calls": False},
    {"custom_id": "text", **CHAT, "max_tokens": 5},
]


@pytest.fixture(scope="module")
def engine(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tiny_engine, tmp_path_factory.mktemp("chats") / "engine", PLAIN)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Cli:
    return in_this_process(capfd)


def answers(call: Cli, engine: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The bodies of the answers to `REQUESTS`."""
    source, output = folder / "requests.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
    code, _, error = call("run-batch", engine, "-i", source, "-o", output, *options)
    assert code == 0, error
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["custom_id"]: row["response"]["body"] for row in rows}


def test_calls_are_read_as_the_command_says(call: Cli, engine: Path, tmp_path: Path) -> None:
    found = answers(call, engine, tmp_path, "--tool-parser", "hermes")
    (choice,) = found["call"]["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (made,) = choice["message"]["tool_calls"]
    arguments = json.loads(made["function"]["arguments"])
    assert made["function"]["name"] == "count" and set(arguments) == {"thing", "trays"}
    assert arguments["thing"] in ("plates", "cards") and arguments["trays"] <= 99
    assert found["text"]["choices"][0]["message"]["content"]


def test_without_a_parser_tools_are_refused_and_the_option_is_named(call: Cli, engine: Path, tmp_path: Path) -> None:
    assert "--tool-parser" in answers(call, engine, tmp_path)["call"]["error"]["message"]


def test_reasoning_is_read_as_the_command_says(call: Cli, engine: Path, tmp_path: Path) -> None:
    message = answers(call, engine, tmp_path, "--reasoning-parser", "deepseek_r1")["text"]["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] is None


def test_unknown_parsers_are_refused(call: Cli, engine: Path, tmp_path: Path) -> None:
    code, _, error = call("run-batch", engine, "-i", tmp_path / "a", "-o", tmp_path / "b", "--tool-parser", "x")
    assert (code, error) == (
        2,
        "error: tool_parser must be one of auto, none, hermes, qwen3_coder, llama3_json, not 'x'\n",
    )
