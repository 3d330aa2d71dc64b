"""Compiling constraints for an engine's vocabulary, with a cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ddtree_trt.errors import MissingDependency, UsageError, install_with, shown
from ddtree_trt.runtime.structured.delayed import DelayedMatcher, Opening
from ddtree_trt.runtime.structured.grammars import grammar_text
from ddtree_trt.runtime.structured.matcher import GrammarMatcher, Matcher, reason_line
from ddtree_trt.runtime.structured.record import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 256  # compiled grammars


@dataclass(frozen=True)
class _Compiled:
    """A constraint for a vocabulary."""

    state: LLMatcher  # at its beginning, to be copied
    opening: Opening | None  # the text behind which it begins


class GrammarCompiler:
    """Compiles the constraints of an engine's requests; any thread may call it. Compiling releases the interpreter, so
    that decoding goes on meanwhile."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        """`tokenizer`: the transformers tokenizer; `stop_ids`: the tokens that end the model's own texts."""
        self._hf = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, _Compiled] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> _Compiled:
        """What sequences under the constraint start from.

        Raises UsageError with the library's reason for a constraint that it cannot compile, MissingDependency where it
        is not installed.
        """
        with self._lock:
            if (found := self._compiled.get(structured)) is not None:
                self._compiled.move_to_end(structured)
                return found
        compiled = self._compile(structured)
        with self._lock:
            self._compiled[structured] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, structured: StructuredOutput, ending: frozenset[int]) -> Matcher:
        """A matcher for one sequence, whose output ends at any of the tokens `ending`. Raises as `compile` does."""
        compiled = self.compile(structured)
        matcher = GrammarMatcher(
            compiled.state.deep_copy(),
            self._tokenizer.tokenize_bytes,
            self._vocab_size,
            ending,
            self._stop_ids - ending,
        )
        if compiled.opening is None:
            return matcher
        return DelayedMatcher(matcher, compiled.opening, self._vocab_size)

    def _compile(self, structured: StructuredOutput) -> _Compiled:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        try:
            grammar = grammar_text(structured, self._special_tokens)
        except ValueError as error:
            raise _refused(structured, str(error)) from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        opening = None if structured.after is None else Opening(structured.after, self._token_bytes)
        return _Compiled(matcher, opening)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._tokenizer.decode_bytes([token]) for token in range(self._vocab_size)]

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


def _refused(structured: StructuredOutput, reason: str) -> UsageError:
    """The error for a constraint that the library refuses, with its reason in one line."""
    given = shown(getattr(structured, structured.kind))
    return UsageError(f"structured: {structured.kind} {given} cannot be used: {reason_line(reason)}")
