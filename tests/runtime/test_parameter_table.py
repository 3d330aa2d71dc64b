"""The table of sampling parameters: what every way in is made of has each row, under the names it states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ddtree_trt.cli import app
from ddtree_trt.commands.options.sampling import with_sampling_options
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.params import PARAMETERS, Parameter, SamplingParams
from ddtree_trt.runtime.structured.record import Structure, StructuredOutput
from ddtree_trt.runtime.values import Biases, Choice, Flag, Integer, Kind, NodeCount, Number, Texts, TokenIds
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest
from ddtree_trt.triton import inputs
from tools.documents import parameter_table as tool

ROOT = Path(__file__).resolve().parents[2]
BODIES: dict[Any, type[ChatRequest] | type[CompletionRequest]] = {"chat": ChatRequest, "completions": CompletionRequest}
BODY: dict[Any, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    "completions": {"prompt": "x"},
}
each_row = pytest.mark.parametrize("row", PARAMETERS.values(), ids=PARAMETERS)
# Of each kind a value as JSON has it, and as it is kept. None is a default.
VALUES: dict[type[Kind], tuple[Any, Any]] = {
    Integer: (3, 3),
    Number: (0.5, 0.5),
    NodeCount: (4, 4),
    Texts: (["x", "y"], ("x", "y")),
    TokenIds: ([5], (5,)),
    Biases: ({"5": 1.0}, {5: 1.0}),
    Structure: ({"regex": "[0-9]"}, StructuredOutput(regex="[0-9]")),
}


def given(row: Parameter) -> tuple[Any, Any]:
    """A value that is not the row's default, as JSON has it and as it is kept."""
    if isinstance(row.kind, Choice):
        return (next(iter(row.kind.others)),) * 2
    return (not row.default,) * 2 if isinstance(row.kind, Flag) else VALUES[type(row.kind)]


@each_row
def test_a_row_describes_its_field(row: Parameter) -> None:
    assert getattr(SamplingParams(), row.name) == row.default
    assert row.help[0].isupper() or row.help[0].isdigit()
    assert (row.help.endswith(".") and not row.more) or row.more.endswith(".")
    assert row.kind.range


@pytest.mark.parametrize("endpoint", BODIES)
def test_bodies_have_the_fields_of_the_table(endpoint: Any) -> None:
    body = BODIES[endpoint]
    fields = {name: row.http_name(endpoint) for name, row in PARAMETERS.items()}
    taken = {name: field for name, field in fields.items() if field is not None}
    assert set(taken.values()) <= set(body.model_fields)
    values = {field: given(PARAMETERS[name])[0] for name, field in taken.items()}
    found = SamplingParams.from_mapping(body.model_validate({**BODY[endpoint], **values}).sampling())
    assert {name: getattr(found, name) for name in taken} == {name: given(PARAMETERS[name])[1] for name in taken}
    assert body.model_validate(BODY[endpoint] | dict.fromkeys(taken.values(), None)).sampling() == {}


def test_what_an_endpoint_does_not_take() -> None:
    def without(endpoint: Any) -> set[str]:
        return {name for name, row in PARAMETERS.items() if row.http_name(endpoint) is None}

    assert without("chat") - without("completions") == {"echo"}
    assert "prompt_logprobs" in without("completions")
    assert PARAMETERS["logprobs"].http_name("chat") == "top_logprobs"


# As TensorRT-LLM's model declares them: the data type, the dimension, and the field it sets.
TENSORS = {
    "max_tokens": ("INT32", 1, "max_tokens"),
    "min_tokens": ("INT32", 1, "min_tokens"),
    "min_length": ("INT32", 1, "min_tokens"),
    "stop_words": ("STRING", -1, "stop"),
    "temperature": ("FP32", 1, "temperature"),
    "top_k": ("INT32", 1, "top_k"),
    "top_p": ("FP32", 1, "top_p"),
    "seed": ("UINT64", 1, "seed"),
    "repetition_penalty": ("FP32", 1, "repetition_penalty"),
    "presence_penalty": ("FP32", 1, "presence_penalty"),
    "frequency_penalty": ("FP32", 1, "frequency_penalty"),
    "num_return_sequences": ("INT32", 1, "n"),
    "num_draft_tokens": ("INT32", 1, "tree_budget"),
}


def test_tensors_are_those_of_the_table() -> None:
    rows = [row for row in inputs.INPUTS["trtllm"] if row.field is not None]
    found = {row.name: (row.dtype, *row.dims, row.field) for row in rows}
    assert {name: found[name] for name in TENSORS} == TENSORS
    assert {tensor: row.name for row in PARAMETERS.values() for tensor in row.tensors} == inputs.FIELDS
    assert [row.name for row in rows if row.bare] == ["num_return_sequences"]
    assert not [row for row in inputs.INPUTS["vllm"] if row.field], "its parameters come in sampling_parameters"


def test_an_entry_of_the_configuration() -> None:
    config = inputs.config("trtllm")
    assert '  {\n    name: "seed"\n    data_type: TYPE_UINT64\n    dims: [ 1 ]\n    optional: true\n  },\n' in config
    assert config.startswith('  {\n    name: "text_input"\n    data_type: TYPE_STRING\n    dims: [ 1 ]\n  },\n')
    reshaped = '"num_return_sequences"\n    data_type: TYPE_INT32\n    dims: [ 1 ]\n    reshape: { shape: [ ] }\n'
    assert reshaped in config
    assert config.index("What follows is declared") < config.index('"bad_words"')


def test_run_has_the_options_of_the_table() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {option: p for p in command.params for option in p.opts}
    offered = [row for row in PARAMETERS.values() if row.metavar is not None]
    assert {row.option for row in offered} <= set(options)
    assert not [row for row in PARAMETERS.values() if row.metavar is None and row.option in options]
    for row in offered:
        assert row.metavar in ("", options[row.option].metavar)
        assert options[row.option].help


def test_options_are_handed_over_under_the_names_of_the_fields() -> None:
    seen: list[dict[str, Any]] = []
    cli = typer.Typer()

    @cli.command()
    @with_sampling_options
    def command(sampling: dict[str, Any], loud: bool = False) -> None:
        seen.append({**sampling, "loud": loud})

    given = "--max-tokens 5 --temperature 0.5 --stop a --stop b --ignore-eos --method ar --tree-budget auto --loud"
    assert CliRunner().invoke(cli, given.split()).exit_code == 0
    assert CliRunner().invoke(cli, ["--tree-budget", "16"]).exit_code == 0
    assert CliRunner().invoke(cli, []).exit_code == 0
    assert seen == [
        {
            **{"max_tokens": 5, "temperature": 0.5, "stop": ["a", "b"], "ignore_eos": True},
            **{"method": "ar", "tree_budget": "auto", "loud": True},
        },
        {"tree_budget": 16, "loud": False},
        {"loud": False},
    ]
    wrong = CliRunner().invoke(cli, ["--tree-budget", "many"])
    assert isinstance(wrong.exception, UsageError)
    assert str(wrong.exception) == "--tree-budget must be a number or auto, not 'many'"


def test_the_documents_table_is_made_of_it() -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    assert tool.with_table(text) == text, "run make docs"
    with pytest.raises(SystemExit, match="lacks the lines"):
        tool.with_table("no table")


@each_row
def test_a_row_of_the_document(row: Parameter) -> None:
    (line,) = (line for line in tool.table().splitlines() if line.startswith(f"| `{row.name}` |"))
    assert line.count("|") == tool.HEAD.splitlines()[0].count("|")
    assert row.help in line and row.more in line and row.kind.range in line
