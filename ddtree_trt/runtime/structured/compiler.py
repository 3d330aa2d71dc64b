"""Compiling constraints for an engine's vocabulary, and the matchers of sequences."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.structured.matcher import Matcher, Opening, Preparing, refused
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.worker_process import LimitReached, Limits, Work, WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of one trial of a stranger's constraint, in another process: compiling it and two steps. A grammar of sixty bytes may
# take minutes to compile, gigabytes, or the stack of the library's recursion, with which the whole process ends. The
# stack is half of the least that a thread of this process has.
TRIAL_LIMITS = Limits(cpu_seconds=1.0, memory_bytes=128 << 20, stack_bytes=1 << 20)


def judging(vocabulary: Any) -> Work:
    """What the process does that tries constraints."""
    text, vocab_size, stop_ids = vocabulary
    compiler = GrammarCompiler(lambda: text, vocab_size, frozenset(stop_ids))
    compiler.try_out(StructuredOutput(regex="(?s:.)*"))  # loads what all trials use

    def judge(fields: Any) -> dict[str, Any]:
        structured = StructuredOutput.from_mapping(fields)
        try:
            compiler.try_out(structured)
        except MemoryError:
            raise
        except UsageError as error:
            return {"error": str(error)}
        except Exception as error:  # of the library's conversions, which may raise anything
            reason = f"the grammar library failed on it ({type(error).__name__}: {error})"[:1000]
            return {"error": str(refused(structured, reason))}
        return {}

    return judge


# That the library holds a grammar to. A unit of fuel is about 1 to 4 µs of work and up to 500 bytes: of compiling, and
# between two masks. A state of a sequence's lexer has 1 to 2 kB.
_LIMITS: Any = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}
_REMEMBERED = 1024  # constraints that were tried, by their hashes
_OPENINGS = 4


class GrammarCompiler:
    """Compiles the constraints of an engine's requests; any thread may call it. Compiling releases the interpreter, so
    that decoding goes on meanwhile.

    Copies of a compiled grammar share what the library learns of it, its memory and its limits, so that each sequence
    has one of its own from when it has a slot to its end. None is kept: a usual one takes less than a millisecond.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, stop_ids: frozenset[int]) -> None:
        """`tokenizer` makes the tokenizer's JSON text; `stop_ids`: the tokens that end the model's own texts."""
        self._tokenizer_text = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self.isolated = False  # whether constraints are tried in a process of their own: those of strangers
        self.limits = TRIAL_LIMITS
        self._lock = threading.Lock()
        self._judge: WorkerProcess | None = None
        self._passed: dict[int, None] = {}
        self._opening = lru_cache(_OPENINGS)(lambda s: Opening(s, self._token_bytes, self._tokenizer.tokenize_bytes))

    def passed(self, structured: StructuredOutput) -> bool:
        """Whether the constraint was checked lately, and can be used."""
        return hash(structured) in self._passed

    def check(self, structured: StructuredOutput) -> None:
        """Raises UsageError for a constraint that cannot be used, MissingDependency without the library."""
        if self.passed(structured):
            return
        (self._try_apart if self.isolated else self.try_out)(structured)
        with self._lock:
            self._passed[hash(structured)] = None
            if len(self._passed) > _REMEMBERED:
                del self._passed[next(iter(self._passed))]

    def try_out(self, structured: StructuredOutput) -> None:
        """Compile the constraint and take a step, where most limits are met. Raises as `check` does."""
        state = self._compile(structured)
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little"))
        if len(tokens) and not state.is_error():
            state.consume_token(int(tokens[0]))
            state.compute_bitmask()
        if state.is_error():
            raise refused(structured, state.get_error())

    def _try_apart(self, structured: StructuredOutput) -> None:
        with self._lock:
            if self._judge is None:
                words = [self._tokenizer_text(), self._vocab_size, sorted(self._stop_ids)]
                self._judge = WorkerProcess(f"{__name__}:judging", self.limits, "constraints cannot be tried", words)
        try:
            answer = self._judge.ask(json.dumps(asdict(structured)).encode())
        except LimitReached as limit:
            raise refused(structured, f"compiling it {limit}; make it smaller") from None
        if "error" in answer:
            raise UsageError(answer["error"])

    def prepare(self, structured: StructuredOutput, ending: frozenset[int]) -> Preparing:
        """`matcher`, to be made on a thread of its own. Raises as `check` does."""
        self.check(structured)
        return Preparing(partial(self.matcher, structured, ending))

    def matcher(self, structured: StructuredOutput, ending: frozenset[int]) -> Matcher:
        """A matcher for one sequence, whose output ends at any of the tokens `ending`. Raises as `check` does."""
        matcher = Matcher(self._compile(structured), self._vocab_size, ending, self._stop_ids - ending)
        matcher.mask()  # takes most of the work; the library keeps it
        if structured.after is not None:
            matcher.opening = opening = self._opening(structured.after)
            opening.crossing(opening.size - 1)  # which many tokens may cross
        return matcher

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        try:
            grammar = _grammar_text(structured)
        except (ValueError, RecursionError) as error:
            raise refused(structured, str(error)) from error
        state = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if state.is_error():
            raise refused(structured, state.get_error())
        return state

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._tokenizer.decode_bytes([token]) for token in range(self._vocab_size)]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingDependency(
                f"structured output needs the package llguidance, which is not installed; {install_with('structured')}"
            ) from error
        try:
            ends = sorted(self._stop_ids) or None
            return LLTokenizer(self._tokenizer_text(), n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            raise UsageError(f"structured: this engine's tokenizer cannot be constrained: {error}") from error


# Constraints in the library's JSON

# White space between two tokens of JSON: bounded, because a model that repeats itself would never come to an end.
DEFAULTS: Any = {"whitespace_pattern": r" |\n {0,20}|\n\t{0,8}"}


def _grammar_text(structured: StructuredOutput) -> str:
    """The grammar as the library takes it. Raises ValueError for one whose notation is not understood."""
    from llguidance import LLMatcher, grammar_from

    if structured.grammar is not None:
        return str(grammar_from("grammar", structured.grammar))
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice:
        # One terminal: the lexer makes a trie of its texts, while the parser would take a row for each of them.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    schema = structured.json_schema if isinstance(structured.json_schema, str) else '{"type": "object"}'
    if schema == "false":
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema("{}" if schema == "true" else schema, defaults=DEFAULTS)
