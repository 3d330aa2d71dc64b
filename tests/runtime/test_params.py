"""SamplingParams: what its fields accept and refuse, and that every way in is made of them."""

import dataclasses
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ddtree_trt.commands.arguments import with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.runtime.params import PARAMETERS, Parameter, SamplingParams
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest
from tools.documents import parameter_table as tool

ROOT = Path(__file__).resolve().parents[2]
each_row = pytest.mark.parametrize("row", PARAMETERS.values(), ids=PARAMETERS)
NUMBERS = {name: row for name, row in PARAMETERS.items() if row.type in (int, float)}
numbers = st.integers() | st.floats() | st.fractions()
numbers |= st.sampled_from([10**400, Fraction(10**400), 1j, np.bool_(True), np.float16("inf")])
texts = st.text(st.characters(exclude_categories=()), max_size=3)  # halves of surrogate pairs too
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=2) | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(numbers | texts, inner, max_size=2),
    max_leaves=4,
)


@each_row
@given(value=anything)
def test_any_value_is_kept_or_refused_by_the_fields_name(row: Parameter, value: Any) -> None:
    try:
        params = SamplingParams(**{row.name: value})
    except UsageError as error:
        assert str(error).startswith(row.name) and len(str(error)) < 600
    else:
        kept = getattr(params, row.name)
        assert dataclasses.replace(params) == params == pickle.loads(pickle.dumps(params))
        assert kept is None or isinstance(kept, getattr(row.type, "__origin__", row.type)) or kept == row.default


@pytest.mark.parametrize("row", NUMBERS.values(), ids=NUMBERS)
@given(data=st.data())
def test_numbers_are_held_to_their_bounds(row: Parameter, data: st.DataObject) -> None:
    assert row.bounds is not None
    lowest, highest = row.bounds.lowest, row.bounds.highest
    whole = row.type is int
    inside = data.draw(st.integers(int(lowest), int(highest)) if whole else st.floats(max(lowest, 1e-30), highest))
    kinds: tuple[Any, ...] = (inside, np.array(inside)[()], Fraction(inside) if not whole else inside)
    for value in kinds:
        kept = getattr(SamplingParams(**{row.name: value}), row.name)
        assert kept == inside and type(kept) is row.type
    outside: list[Any] = [lowest - 1, highest + 1, True, "5", float("nan"), [inside]]
    says = rf'^{row.name} must be ("auto" or )?an? (integer|number) .*{int(lowest)}'
    for value in outside:
        with pytest.raises(UsageError, match=says):
            SamplingParams(**{row.name: value})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens (6) is above max_tokens (5)"),
    ({"temperature": 1e-320}, "temperature must be 0, for greedy decoding, or from 1e-30 to 100"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1; for greedy decoding set temperature=0"),
    ({"stop": ["a", ""]}, "stop[1] must be a text that is not empty, not ''"),
    ({"stop": ["a", "\ud800"]}, "stop[1] must be valid Unicode (character 0 is half of a surrogate pair)"),
    ({"logit_bias": {"x": 1}}, "logit_bias: a key must be an integer from 0"),
    ({"logit_bias": {5: 101}}, "logit_bias[5] must be a number from -100 to 100, not 101"),
    (
        {"method": "magic"},
        "method must be auto or one of ddtree, dflash, ar, dflash-sample, draft-model, eagle, not 'magic'",
    ),
    ({"method": "ar", "tree_budget": 4}, "method 'ar' drafts nothing: tree_budget 4 cannot be honoured"),
    ({"structured": "[]"}, "structured must be a StructuredOutput or an object of its fields, not []"),
]


@pytest.mark.parametrize(("values", "text"), REFUSED, ids=lambda v: str(v)[:50])
def test_what_a_refusal_says(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "x"}, ("x",)),
        ({"stop": {"x": 1, "y": 2}.keys()}, ("x", "y")),
        ({"stop_token_ids": [np.int64(5), 6]}, (5, 6)),
        ({"logit_bias": {"5": np.float32(2), np.int64(6): 1}}, {5: 2.0, 6: 1.0}),
        *(({"method": method}, method) for method in METHODS),
    ],
    ids=str,
)
def test_the_form_in_which_values_are_kept(given: dict[str, Any], kept: Any) -> None:
    (name,) = given
    assert getattr(SamplingParams(**given), name) == kept


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown sampling parameter beams, width; known are"):
        SamplingParams.from_mapping({"beams": 4, "width": 2, "temperature": 1})
    with pytest.raises(TypeError):
        SamplingParams(beams=2)  # type: ignore[call-arg]
    assert SamplingParams.from_mapping({"temperature": 1}) == SamplingParams(temperature=1)


def test_params_do_not_change() -> None:
    stop, bias = ["x"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("y")
    bias[1] = 5.0
    assert (params.stop, params.logit_bias) == (("x",), {1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


BODIES: dict[Any, type[ChatRequest] | type[CompletionRequest]] = {"chat": ChatRequest, "completions": CompletionRequest}
BODY: dict[Any, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    "completions": {"prompt": "x"},
}
# Of each type a value as JSON has it. None is a default.
VALUES: dict[Any, Any] = {
    int: 3, float: 0.5, str: "ddtree", tuple[str, ...]: ["x", "y"], tuple[int, ...]: [5], dict[int, float]: {"5": 1.0},
    StructuredOutput: {"regex": "[0-9]"},
}  # fmt: skip


@pytest.mark.parametrize("endpoint", BODIES)
def test_bodies_have_the_fields(endpoint: Any) -> None:
    body = BODIES[endpoint]
    fields = {name: row.http_name(endpoint) for name, row in PARAMETERS.items()} | {"structured": "structured_outputs"}
    taken = {name: field for name, field in fields.items() if field is not None}
    left_out = {"prompt_logprobs", "keep_special_tokens"} | ({"echo"} if endpoint == "chat" else set())
    assert set(PARAMETERS) - set(taken) == left_out
    rows = {name: PARAMETERS[name] for name in taken}
    given: Any = {name: not row.default if row.type is bool else VALUES[row.type] for name, row in rows.items()}
    asked = body.model_validate(BODY[endpoint] | {field: given[name] for name, field in taken.items()})
    found = SamplingParams.from_mapping(asked.sampling())
    assert found == SamplingParams(**given) and all(getattr(found, name) != row.default for name, row in rows.items())
    assert body.model_validate(BODY[endpoint] | dict.fromkeys(taken.values(), None)).sampling() == {}
    assert PARAMETERS["logprobs"].http_name("chat") == "top_logprobs"


def test_options_are_handed_over_under_the_names_of_the_fields() -> None:
    seen: list[dict[str, Any]] = []
    cli = typer.Typer()

    @cli.command()
    @with_options()
    def command(sampling: dict[str, Any], loud: bool = False) -> None:
        seen.append({**sampling, "loud": loud})

    given = "--max-tokens 5 --temperature 0.5 --stop a --stop b --ignore-eos --method ar --tree-budget auto --loud"
    for words in (given, "--tree-budget 16", ""):
        assert CliRunner().invoke(cli, words.split()).exit_code == 0
    expected = {"max_tokens": 5, "temperature": 0.5, "stop": ["a", "b"], "ignore_eos": True, "method": "ar"}
    assert seen == [
        {**expected, "tree_budget": "auto", "loud": True},
        {"tree_budget": 16, "loud": False},
        {"loud": False},
    ]
    wrong = CliRunner().invoke(cli, ["--tree-budget", "many"])
    assert isinstance(wrong.exception, UsageError)
    assert str(wrong.exception) == "--tree-budget must be a number or auto, not 'many'"


def test_the_documents_table_is_made_of_it() -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    assert tool.with_table(text) == text, "run make docs"
