"""Small vocabularies whose constraints a test can write down, and what they allow, found by trying every text."""

import itertools
import re
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.compiler import GrammarCompiler
from ddtree_trt.runtime.structured.record import StructuredOutput


class _Tokens:
    bos_token_id = None

    def __init__(self, tokens: Sequence[str], end: int) -> None:
        self.tokens = [token.encode() for token in tokens]
        self.eos_token_id = end
        self.special_token_ids = [end]

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in raw]  # of single letters


class Compiler(GrammarCompiler):
    """Compiles for a vocabulary of tokens, of which `end` ends a text."""

    def __init__(self, tokens: Sequence[str], end: int) -> None:
        super().__init__(str, len(tokens), frozenset([end]))
        # Takes the place of what is made of a tokenizer's text.
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokens, end)), n_vocab=len(tokens))


def letters(count: int) -> list[str]:
    return [*(chr(97 + i) for i in range(count - 1)), "<end>"]


def constrained(structured: StructuredOutput, compiler: Compiler) -> type[Sampler]:
    class Constrained(Sampler):
        def __init__(
            self, params: SamplingParams, vocab_size: int, prompt: list[int], stop_ids: frozenset[int], index: int = 0
        ) -> None:
            matcher = compiler.matcher(structured, stop_ids)
            super().__init__(params, vocab_size, prompt, stop_ids, index, matcher)

    return Constrained


def texts_of(expression: str, alphabet: str, longest: int) -> set[str]:
    """Every text of at most that many letters which the expression matches."""
    words = (word for size in range(longest + 1) for word in itertools.product(alphabet, repeat=size))
    return {text for text in map("".join, words) if re.fullmatch(expression, text)}
