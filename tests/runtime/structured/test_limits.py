"""Limits of constraints: of what one may cost a step, a sequence and the process, and whom it stops."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from languages import Compiler

from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.compiler import GrammarCompiler, Judge, literal
from ddtree_trt.runtime.structured.matcher import Opening, Preparing
from ddtree_trt.runtime.structured.record import MAX_AFTER, MAX_CHOICES, StructuredOutput
from ddtree_trt.worker_process import Limits

LETTERS = [*'abcdefghijklmnopqrstuvwxyz"', "<end>"]
END = len(LETTERS) - 1
COMPILER = Compiler(LETTERS, END)
PROMPT = [{"role": "user", "content": "There are 6 drawers, each with 32 cards. How many cards are there?"}]


def test_an_opening_is_found_as_by_search() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
        tokens = sorted({"".join(rng.choice("abc") for _ in range(rng.randint(1, 9))).encode() for _ in range(40)})
        opening, whole = Opening(text, tokens), b""
        state: int | None = 0
        for _ in range(20):
            assert state is not None
            beyond = [t for t, raw in enumerate(tokens) if (whole + raw).partition(text.encode())[2]]
            assert opening.crossing(state) == beyond, (text, whole)
            token = rng.randrange(len(tokens))
            whole += tokens[token]
            state = opening.feed(state, token)
            _, found, rest = whole.partition(text.encode())
            assert (state == opening.size) == (bool(found) and not rest) and (state is None) == bool(rest)
            if found:
                break


@pytest.mark.parametrize("text", ["a" * MAX_AFTER, "ab" * (MAX_AFTER // 2), "é" * MAX_AFTER])
def test_the_longest_opening_takes_little_memory(text: str) -> None:
    tokens = [b"a" * n for n in range(1, 64)] + [f"{n}b".encode() for n in range(5000)]
    tracemalloc.start()
    opening = Opening(text, tokens)
    crossing = max(len(opening.crossing(state)) for state in range(len(text.encode())))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1 << 20 and crossing <= len(tokens)


EXPLOSIONS = [
    ({"regex": "(a{1000}){1000}"}, "step_lexer_fuel"),
    ({"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "step_lexer_fuel"),
    ({"regex": "|".join(f"[ab]{{{2000 - i}}}{chr(99 + i % 20)}" for i in range(900))}, "step_lexer_fuel"),
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


def test_as_many_choices_as_are_promised(llm: LLM) -> None:
    rng = random.Random(4)
    numbered = tuple(f"choice number {i}" for i in range(MAX_CHOICES))
    words = tuple("".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(60)) for _ in range(MAX_CHOICES))
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


def test_a_constraint_that_compiles_for_long_delays_its_own_sequence_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, prepare = threading.Event(), GrammarCompiler.prepare

    def slowly(self: GrammarCompiler, structured: StructuredOutput, ending: frozenset[int]) -> Preparing:
        preparing = prepare(self, structured, ending)
        make = preparing._make
        preparing._make = lambda: go.wait() and make()  # type: ignore[assignment, return-value]
        return preparing

    monkeypatch.setattr(GrammarCompiler, "prepare", slowly)
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


def test_special_tokens_of_a_text_are_found_however_many_there_are() -> None:
    special = {"<|end|>": 7, "<|end|>x": 8, "": 9}
    assert literal("a<|end|>xb<|end|>", special) == '"a" <[8]> "b" <[7]>'
    assert literal("<|end|>" * 50_000, special) == " ".join(["<[7]>"] * 50_000)
    assert literal('é"', special) == literal('é"', {}) == '"é\\""' and literal("", special) == '""'


# In a process of their own.

CHAIN = "start: a0\n" + "\n".join(f'a{i}: "x{i}" | "y{i}" "z" a{(i + 1) % 9000}' for i in range(9000))
HOSTILE = [
    ({"grammar": CHAIN}, r"too large \(signal 11\)"),
    ({"regex": "\\w|\\W" * 8000}, "more than the 128 MiB"),
    ({"regex": "("}, "unclosed group"),
    ({"json_schema": '{"items":' * 900 + "{}" + "}" * 900}, "recursion limit exceeded"),
]


@pytest.fixture(scope="module")
def stranger(llm: LLM) -> Iterator[GrammarCompiler]:
    """A compiler that tries constraints in a process."""
    maker = llm.core.maker
    own = maker.grammars
    compiler = GrammarCompiler(llm.tokenizer, own._vocab_size, own._stop_ids)
    compiler.isolated = True
    yield compiler
    compiler.close()


@pytest.mark.parametrize(("fields", "reason"), HOSTILE, ids=[reason[:20] for _, reason in HOSTILE])
def test_what_would_end_the_process_is_refused(
    stranger: GrammarCompiler, fields: dict[str, object], reason: str
) -> None:
    structured = StructuredOutput.from_mapping(fields)
    with pytest.raises(UsageError, match=rf"structured: {structured.kind} .* cannot be used: .*{reason}"):
        stranger.check(structured)
    stranger.check(StructuredOutput(regex=f"a{{{len(reason)}}}"))


def test_a_trial_ends_when_its_time_is_up(stranger: GrammarCompiler) -> None:
    stranger.check(StructuredOutput(regex="z"))
    vocab_size, ends = stranger._vocab_size, stranger._stop_ids
    text = stranger._hf.backend_tokenizer.to_str()
    judge = Judge(text, {}, vocab_size, ends, Limits(cpu_seconds=0.2, memory_bytes=8 << 30))
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 300)]}
    with pytest.raises(UsageError, match=r"more than 0\.2 s of a processor; make it smaller"):
        judge.check(StructuredOutput(json_schema=endless))
    judge.check(StructuredOutput(regex="a"))
    judge.close()


def test_a_trial_that_cannot_begin_is_no_fault_of_the_constraint() -> None:
    judge = Judge("{}", {}, 10, frozenset([1]))
    with pytest.raises(
        EngineError, match="constraints cannot be tried: UsageError: structured: this engine's tokenizer"
    ):
        judge.check(StructuredOutput(regex="a"))
