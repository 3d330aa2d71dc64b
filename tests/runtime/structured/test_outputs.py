"""Outputs under constraints: every one satisfies its constraint, and no method changes a token of it."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
from languages import Compiler

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.compiler import TRIAL_LIMITS, GrammarCompiler
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.worker_process import Limits

PROMPT = [{"role": "user", "content": "There are 6 drawers, each with 32 cards. How many cards are there?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def outputs(llm: LLM, structured: StructuredOutput, **params: Any) -> list[CompletionOutput]:
    given = SamplingParams(**{"max_tokens": 300, "seed": 3, "structured": structured, **params})
    return llm.generate([PROMPT], given)[0].outputs


COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{2,5} cards\\."}, "[0-9]{2,5} cards\\."),
    ({"choice": ["many cards", "few", "fewer", 'né\n"q"']}, 'many cards|few|fewer|né\n"q"'),
    ({"grammar": 'start: "<" word ("," word){1,2} ">"\nword: /[a-f]{1,3}/'}, "<[a-f]{1,3}(,[a-f]{1,3}){1,2}>"),
    ({"grammar": 'root ::= ("x" | "yy") [0-9] [0-9]?'}, "(x|yy)[0-9]{1,2}"),
    ({"grammar": f'start: "<call>" %json {json.dumps(COMPACT)} "</call>"'}, "<call>{[^<]*}</call>"),
    ({"regex": "[a-f]{3,6}!", "after": "Answer"}, "(?s:.*)Answer[a-f]{3,6}!"),
    ({"regex": "[0-9]{2,4}\\.", "after": "Answer: "}, "(?s:.*)Answer: [0-9]{2,4}\\."),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("fields", "expression"), FORMS, ids=[expression[:20] for _, expression in FORMS])
def test_every_form(llm: LLM, fields: dict[str, Any], expression: str, temperature: float) -> None:
    structured = StructuredOutput.from_mapping(fields)
    (expected,) = outputs(llm, structured, method="ar", temperature=temperature)
    (found,) = outputs(llm, structured, method="ddtree", tree_budget=8, temperature=temperature)
    assert found.token_ids == expected.token_ids and found.finish_reason == "stop"
    assert re.fullmatch(expression, found.text), found.text
    if "<call>" in found.text:
        jsonschema.validate(json.loads(found.text.removeprefix("<call>").removesuffix("</call>")), SCHEMA)


def test_masks_in_front_of_a_grammar_that_begins_in_one_way(llm: LLM) -> None:
    matcher = llm.core.maker.grammars.matcher(StructuredOutput(regex="the answer[0-9]+", after=" "), frozenset())
    mask = matcher.mask().tolist()
    assert mask == [matcher.allows(token) for token in range(len(mask))]
    texts = [llm.codec.decode([token]) for token, allowed in enumerate(mask) if allowed]
    assert {" ", " t", " the"} <= set(texts) and " a" not in texts


def test_every_choice_is_reached(llm: LLM) -> None:
    choices = ("a cat", "a car", "a", "dog", "12")
    found = outputs(llm, StructuredOutput(choice=choices), temperature=5.0, n=64, method="ddtree", tree_budget=4)
    assert {output.text for output in found} == set(choices)


def test_log_probabilities_are_the_targets_own(llm: LLM) -> None:
    (found,) = outputs(llm, StructuredOutput(choice=("few", "many")), logprobs=2)
    (free,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=2))[0].outputs
    assert found.logprobs and free.logprobs
    assert found.logprobs[0].top == free.logprobs[0].top
    assert found.logprobs[0].rank > 1 and found.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_stop_string_and_a_limit_cut_the_output(llm: LLM) -> None:
    structured = StructuredOutput(regex="abcdefabcdef")
    (whole,) = outputs(llm, structured)
    (stopped,) = outputs(llm, structured, stop=["fab"])
    (short,) = outputs(llm, structured, max_tokens=2)
    assert (whole.text, stopped.text, stopped.stop_reason) == ("abcdefabcdef", "abcde", "fab")
    assert short.finish_reason == "length" and whole.text.startswith(short.text)


def test_the_end_of_the_text_comes_before_other_limits(llm: LLM) -> None:
    (found,) = outputs(llm, StructuredOutput(regex="ab"), min_tokens=20, ignore_eos=True)
    assert (found.text, found.finish_reason) == ("ab", "stop")
    (longer,) = outputs(llm, StructuredOutput(regex="a*"), min_tokens=5, max_tokens=40)
    assert set(longer.text) == {"a"} and len(longer.token_ids) >= 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "("}, 'at 1(8): invalid regex "(" (in regex): regex parse error: error: unclosed group'),
        ({"grammar": 'start: "a" | b\nb: ^'}, "2(4): lexer error"),
    ],
)
def test_a_reason_of_the_library_is_one_line_without_quotations(llm: LLM, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as error:
        outputs(llm, StructuredOutput(**fields))
    assert str(error.value).endswith(f" cannot be used: {reason}")


# Limits: of what a constraint may cost a step, a sequence and the process, and whom it stops


LETTERS = [*'abcdefghijklmnopqrstuvwxyz"', "<end>"]
END = len(LETTERS) - 1
COMPILER = Compiler(LETTERS, END)


EXPLOSIONS = [
    ({"regex": "(a{1000}){1000}"}, "step_lexer_fuel"),
    ({"json_schema": {"enum": list(range(100_000))}}, "initial_lexer_fuel"),
    ({"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}}, "max_items_in_row"),
]


@pytest.mark.parametrize(("fields", "limit"), EXPLOSIONS, ids=[str(fields)[:40] for fields, _ in EXPLOSIONS])
def test_a_grammar_that_explodes_is_refused_by_the_limit(llm: LLM, fields: dict[str, object], limit: str) -> None:
    with pytest.raises(UsageError, match=rf"^structured: .* cannot be used: .*\({limit}\); make it smaller"):
        llm.core.maker.grammars.check(StructuredOutput.from_mapping(fields))


def test_a_sequence_that_comes_to_a_limit_stops_no_other() -> None:
    structured = StructuredOutput(regex="a{0,100000}|b{0,100000}")
    greedy, modest = (COMPILER.matcher(structured, frozenset([END])) for _ in range(2))
    modest.advance(1)
    with pytest.raises(UsageError, match=r"than is allowed \(max_lexer_states\); make it smaller"):
        for _ in range(25_000):
            greedy.advance(0)
    modest.advance(1)
    assert modest.mask().nonzero()[0].tolist() == [1, END]
    COMPILER.matcher(structured, frozenset([END])).advance(0)


def test_a_long_output_of_which_no_mask_is_asked_has_fuel_enough() -> None:
    schema = {"type": "string", "maxLength": 19_000}
    matcher, quote = COMPILER.matcher(StructuredOutput(json_schema=schema), frozenset([END])), LETTERS.index('"')
    matcher.advance(quote)
    rng = random.Random(3)
    for _ in range(12_000):
        token = rng.randrange(quote)
        assert matcher.allows(token)
        matcher.advance(token)


def test_thousands_of_choices(llm: LLM) -> None:
    rng = random.Random(4)
    numbered = tuple(f"choice number {i}" for i in range(10_000))
    words = tuple("".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(60)) for _ in range(10_000))
    for choice in (numbered, words):
        params = SamplingParams(max_tokens=200, temperature=5.0, seed=1, structured=StructuredOutput(choice=choice))
        (output,) = llm.generate([PROMPT], params)[0].outputs
        assert output.text in choice and output.finish_reason == "stop"


def test_one_constraint_that_fails_while_it_runs_ends_its_own_request(llm: LLM) -> None:
    fails = StructuredOutput(regex="[0-9]{12}(a{1000}){1000}")  # the trial does not come behind the digits
    params = [
        SamplingParams(max_tokens=40, temperature=0),
        SamplingParams(max_tokens=40, structured=fails),
        SamplingParams(max_tokens=40, structured=StructuredOutput(regex="abcabc")),
    ]
    free, failed, held = (request.outputs[0] for request in llm.generate([PROMPT] * 3, params))
    assert failed.finish_reason == "error" and failed.error is not None
    assert failed.error.startswith("structured: ") and "(max_lexer_states); make it smaller" in failed.error
    assert failed.text[:12].isdecimal()
    assert (held.text, held.finish_reason, held.error) == ("abcabc", "stop", None)
    assert len(free.token_ids) > 5 and free.error is None
    with pytest.raises(UsageError, match="max_lexer_states"):
        list(llm.stream(PROMPT, params[1]))


def test_a_constraint_that_compiles_long_delays_its_own_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go, matcher = threading.Event(), GrammarCompiler.matcher
    monkeypatch.setattr(GrammarCompiler, "matcher", lambda *given: go.wait() and matcher(*given))
    make = llm.core.maker.make
    slow = make(PROMPT, SamplingParams(structured=StructuredOutput(regex="ab")))
    other = make(PROMPT, SamplingParams(max_tokens=30))
    llm.core.add(slow)
    llm.core.add(other)
    while not other.finished:
        llm.core.scheduler.step()
    assert slow.output().outputs[0].token_ids == []
    go.set()
    while not slow.finished:
        llm.core.scheduler.step()
    assert slow.output().outputs[0].text == "ab"


# In a process of their own.

CHAIN = "start: a0\n" + "\n".join(f'a{i}: "x{i}" | "y{i}" "z" a{(i + 1) % 9000}' for i in range(9000))
DEADLY = [
    ({"grammar": CHAIN}, r"too large \(signal 11\)"),
    ({"regex": "\\w|\\W" * 8000}, "more than the 128 MiB"),
    ({"regex": "("}, "unclosed group"),
    ({"json_schema": '{"items":' * 900 + "{}" + "}" * 900}, "recursion limit exceeded"),
]


@contextmanager
def stranger_s(llm: LLM, limits: Limits) -> Iterator[GrammarCompiler]:
    """A compiler that tries constraints in a process."""
    own = llm.core.maker.grammars
    compiler = GrammarCompiler(own._tokenizer_text, own._vocab_size, own._stop_ids)
    compiler.isolated, compiler.limits = True, limits
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def stranger(llm: LLM) -> Iterator[GrammarCompiler]:
    with stranger_s(llm, TRIAL_LIMITS) as compiler:
        yield compiler


@pytest.mark.parametrize(("fields", "reason"), DEADLY, ids=[reason[:20] for _, reason in DEADLY])
def test_what_would_end_process_is_refused(stranger: GrammarCompiler, fields: dict[str, object], reason: str) -> None:
    structured = StructuredOutput.from_mapping(fields)
    with pytest.raises(UsageError, match=rf"structured: {structured.kind} .* cannot be used: .*{reason}"):
        stranger.check(structured)
    stranger.check(StructuredOutput(regex=f"a{{{len(reason)}}}"))


def test_a_trial_ends_when_its_time_is_up(llm: LLM) -> None:
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 300)]}
    with stranger_s(llm, Limits(cpu_seconds=0.2, memory_bytes=8 << 30)) as hasty:
        with pytest.raises(UsageError, match=r"more than 0\.2 s of a processor; make it smaller"):
            hasty.check(StructuredOutput(json_schema=endless))
        hasty.check(StructuredOutput(regex="a"))
