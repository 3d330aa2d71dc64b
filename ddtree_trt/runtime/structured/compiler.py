"""Compiling constraints for an engine's vocabulary, and the matchers of sequences."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.structured.delayed import DelayedMatcher, Opening
from ddtree_trt.runtime.structured.grammars import grammar_text
from ddtree_trt.runtime.structured.judge import Judge
from ddtree_trt.runtime.structured.matcher import GrammarLimits, GrammarMatcher, Matcher, Preparing, refused
from ddtree_trt.runtime.structured.record import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_REMEMBERED = 1024  # constraints that were tried, by their hashes
_OPENINGS = 16


class GrammarCompiler:
    """Compiles the constraints of an engine's requests; any thread may call it. Compiling releases the interpreter, so
    that decoding goes on meanwhile.

    Copies of a compiled grammar share what the library learns of it, its memory and its limits, so that each sequence
    has one of its own from when it has a slot to its end. None is kept: a usual one takes less than a millisecond.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        """`tokenizer`: the transformers tokenizer; `stop_ids`: the tokens that end the model's own texts."""
        self._hf = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self.isolated = False  # whether constraints are tried in a process of their own: those of strangers
        self._lock = threading.RLock()
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._opening = lru_cache(_OPENINGS)(lambda text: Opening(text, self._token_bytes))

    def passed(self, structured: StructuredOutput) -> bool:
        """Whether the constraint was checked lately, and can be used."""
        return hash(structured) in self._passed

    def check(self, structured: StructuredOutput) -> None:
        """Raises UsageError, which says why, for a constraint that cannot be used, MissingDependency where the library
        is not installed."""
        if self.passed(structured):
            return
        if self.isolated:
            with self._lock:
                judge = self._process
            judge.check(structured)
        else:
            self.try_out(structured)
        with self._lock:
            self._passed[hash(structured)] = None
            while len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)

    def try_out(self, structured: StructuredOutput) -> None:
        """Compile the constraint and take a step: most of what cannot be used comes to a limit there. Raises as `check`
        does."""
        state = self._compile(structured)
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little"))
        if len(tokens) and not state.is_error():
            state.consume_token(int(tokens[0]))
            state.compute_bitmask()
        if state.is_error():
            raise refused(structured, state.get_error())

    def prepare(self, structured: StructuredOutput, ending: frozenset[int]) -> Preparing:
        """`matcher`, to be made on a thread of its own. Raises as `check` does."""
        self.check(structured)
        return Preparing(partial(self.matcher, structured, ending))

    def matcher(self, structured: StructuredOutput, ending: frozenset[int]) -> Matcher:
        """A matcher for one sequence, whose output ends at any of the tokens `ending`. Raises as `check` does."""
        state, tokenizer = self._compile(structured), self._tokenizer
        banned = self._stop_ids - ending
        matcher = GrammarMatcher(state, tokenizer.tokenize_bytes, self._vocab_size, ending, banned)
        matcher.mask()  # takes most of the work; the library keeps it
        if structured.after is None:
            return matcher
        delayed = DelayedMatcher(matcher, self._opening(structured.after), self._vocab_size, self._tokens.get)
        delayed.mask()
        return delayed

    def close(self) -> None:
        """End the process in which constraints are tried, if there is one."""
        with self._lock:
            if (judge := self.__dict__.get("_process")) is not None:
                judge.close()

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **asdict(GrammarLimits()))
        try:
            grammar = grammar_text(structured, self._special_tokens)
        except (ValueError, RecursionError) as error:
            raise refused(structured, str(error)) from error
        state = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if state.is_error():
            raise refused(structured, state.get_error())
        return state

    @cached_property
    def _process(self) -> Judge:
        text = self._hf.backend_tokenizer.to_str()
        return Judge(text, self._special_tokens, self._vocab_size, self._stop_ids)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._tokenizer.decode_bytes([token]) for token in range(self._vocab_size)]

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        """The tokens that are only texts, by their bytes."""
        special = self._tokenizer.is_special_token
        plain = (t for t in range(self._vocab_size) if t not in self._stop_ids and not special(t))
        return {self._token_bytes[token]: token for token in plain}

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        return {name: token for name, token in self._hf.get_vocab().items() if self._tokenizer.is_special_token(token)}

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self._ll_tokenizer

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingDependency(
                f"structured output needs the package llguidance, which is not installed; {install_with('structured')}"
            ) from error
        text = self._hf.backend_tokenizer.to_str()
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(self._stop_ids) or None)
        except ValueError as error:
            raise UsageError(f"structured: this engine's tokenizer cannot be constrained: {error}") from error
