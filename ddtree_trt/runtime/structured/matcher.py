"""Matchers, one for each constrained sequence: which tokens may come next, advanced by every emitted token."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.reading import printable
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.runtime.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher


_KEPT = 2  # states of an opening whose crossing tokens are


class Opening:
    """A text behind which constraints begin. A state is how many bytes of it the output ends with, at most `size`."""

    def __init__(self, text: str, token_bytes: Sequence[bytes], tokens: Callable[[bytes], list[int]]) -> None:
        """`token_bytes`: the bytes of every token of the vocabulary; `tokens`: those of bytes."""
        self._text = text.encode()
        self._bytes, self._tokens = token_bytes, tokens
        self.size = len(self._text)
        self._crossing = [token for token, raw in enumerate(token_bytes) if self._may_cross(raw)]
        self.crossing = lru_cache(_KEPT)(self._crossing_at)

    def _may_cross(self, raw: bytes) -> bool:
        """Whether these bytes end the text behind some state, and have more behind it."""
        text, end = self._text, 0
        while end := raw.find(text[-1], end, -1) + 1:
            if raw[:end].endswith(text) or text.endswith(raw[:end]):
                return True
        return False

    def feed(self, state: int, token: int) -> tuple[int, list[int]]:
        """The state behind a token; and the tokens of what it has behind the text's end."""
        text, output = self._text, self._text[:state] + self._bytes[token]
        if (place := output.find(text)) >= 0:
            behind = output[place + self.size :]
            return self.size, self._tokens(behind) if behind else []
        return next(size for size in range(min(len(text), len(output)), -1, -1) if output.endswith(text[:size])), []

    def _crossing_at(self, state: int) -> list[tuple[int, list[int]]]:
        """The tokens that end the text at a state and have more behind it, each with the tokens of that."""
        fed = ((token, self.feed(state, token)[1]) for token in self._crossing)
        return [(token, behind) for token, behind in fed if behind]


Mask = NDArray[np.bool_]  # [V]
MAX_REASON = 400  # characters of the library's reason in a message


# A mask renews the lexer's fuel; without one, as many tokens are taken before one is made for that alone. A token of a
# text with a bound on its length takes some fifty units, and what is allowed of a tree as much for each of its levels.
_TOKENS_OF_FUEL = 8
_SMALLER = "make it smaller: shorter repetitions, fewer alternatives, bounds that are less far apart"
# What the library says → the limit that was reached.
_LIMITS = {
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    **dict.fromkeys(("(grammar) too big", "precomputation failed", "fuel exhausted"), "initial_lexer_fuel"),
    "Current row has": "max_items_in_row",
    "Too many items": "step_max_items",
    "symbols.len() < u16::MAX": "symbols",
}
_QUOTED = re.compile(r"\s*\d+ \| ")  # a numbered line of a grammar


class Matcher:
    """Holds a sequence to its constraint: a grammar, which may begin behind an opening. Up to the opening's end
    everything is allowed; a token may go beyond it with what the grammar begins with. Only `advance` changes it.

    Attributes:
        ended: whether nothing can follow the output.
        opening: None once the grammar has begun.
    """

    def __init__(self, state: LLMatcher, vocab_size: int, ending: frozenset[int], banned: frozenset[int]) -> None:
        """`state`: of the grammar. `ending`: tokens that end the output, allowed where its text is complete; `banned`:
        tokens that the grammar never allows."""
        self._state = state
        self._vocab_size = vocab_size
        self._ending = ending
        self._banned = banned
        self.opening: Opening | None = None
        self._place, self._before = 0, dict[int, Mask]()  # the opening's state, and the masks of those that were
        self.ended = False
        self._since_mask = 0  # tokens taken

    def allowed_length(self, path: Sequence[int]) -> int:
        """How many tokens of the path may follow the output, one after the other."""
        length, place, begun = 0, self._place, list[int]()
        while self.opening is not None and place != self.opening.size:
            if length == len(path):
                return length
            place, begun = self.opening.feed(place, path[length])
            length += 1
        rest = list(path[length:])
        end = next((i for i, token in enumerate(rest) if token in self._ending or token in self._banned), None)
        tokens = begun + rest[:end]
        allowed = self._state.validate_tokens(tokens)
        if end is not None and allowed == len(tokens) and rest[end] in self._ending:
            behind = self._state.deep_copy()
            behind.consume_tokens(tokens)
            _check(behind)
            allowed += behind.is_accepting()
        return length - 1 if allowed < len(begun) else length + allowed - len(begun)

    def allows(self, token: int) -> bool:
        """Whether the token may be next."""
        return self.allowed_length([token]) == 1

    def mask(self) -> Mask:
        """The tokens that may be next, bool [V]. Raises UsageError where there are none or a limit is met."""
        if self.opening is not None:
            if (mask := self._before.get(self._place)) is None:
                mask = self._before[self._place] = np.ones(self._vocab_size, bool)
                for token, behind in self.opening.crossing(self._place):
                    mask[token] = self._state.validate_tokens(behind) == len(behind)
                _check(self._state)
            return mask.copy()
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        _check(self._state)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        mask[[t for t in self._banned if t < len(mask)]] = False
        mask[[t for t in self._ending if t < len(mask)]] = self._state.is_accepting()
        if not mask.any():
            raise UsageError("structured: no token of the model's vocabulary continues the output")
        return mask

    def advance(self, token: int) -> None:
        """Take an emitted token. Raises UsageError for one that is not allowed."""
        tokens = [token]
        if self.opening is not None:
            self._place, tokens = self.opening.feed(self._place, token)
            if self._place == self.opening.size:
                self.opening = None
        elif token in self._ending:
            self.ended, tokens = True, []
        for token in tokens:
            self._state.consume_token(token)
            self._since_mask += 1
            if self._since_mask == _TOKENS_OF_FUEL:
                self._since_mask = 0
                self._state.compute_bitmask()
            _check(self._state)
            self.ended = self._state.is_stopped()


# What a constraint leaves of a draft

_SPARE_SHARE, _MOST_SPARE = 3, 192  # per node, and in all


def with_spare(nodes: int) -> int:
    """How many nodes to draft so that about `nodes` are allowed: most of those proposed are not."""
    return nodes + min(_SPARE_SHARE * nodes, _MOST_SPARE)


def allowed_part(tree: DraftTree, matcher: Matcher) -> DraftTree:
    """The nodes of the tree whose paths the constraint allows, in their order.

    A beginning of the result is the allowed part of a beginning of the tree, so a budget may cut it.
    """
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    allowed: list[bool | None] = [True] + [None] * len(tree)  # None: not yet judged
    for leaf in range(len(tree), 0, -1):
        if allowed[leaf] is not None:
            continue
        path, node = [], leaf
        while node > 0 and allowed[node] is not False:
            path.append(node)
            node = parents[node]
        path.reverse()
        # Behind a node that is not allowed, none is.
        length = 0 if node else matcher.allowed_length([tokens[n - 1] for n in path])
        for place, each in enumerate(path):
            allowed[each] = place < length
    kept = np.array(allowed[1:], bool)
    return tree if kept.all() else tree.only(kept)


def _check(state: LLMatcher) -> None:
    if state.is_error():
        raise UsageError(f"structured: the output could not be matched: {reason_line(state.get_error())}")


def reason_line(text: str) -> str:
    """The library's reason in one line, without what it quotes. Limits are named, with what to do."""
    if limit := next((limit for sign, limit in _LIMITS.items() if sign in text), None):
        return f"it takes more work or room than is allowed ({limit}); {_SMALLER}"
    lines = text.partition("<backtrace>")[0].splitlines()
    marks = {place for place, line in enumerate(lines) if set(line.strip()) == {"^"}}  # they point into the line above
    said = (line for i, line in enumerate(lines) if not marks & {i, i + 1} and not _QUOTED.match(line))
    line = printable(" ".join(" ".join(said).split()))
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def refused(structured: StructuredOutput, reason: str) -> UsageError:
    """The error for a constraint that cannot be used, with the library's reason, or ours, in one line."""
    given = shown(getattr(structured, structured.kind))
    return UsageError(f"structured: {structured.kind} {given} cannot be used: {reason_line(reason)}")


class Preparing:
    """The matcher of a sequence, which is made on a thread of its own when it is started."""

    def __init__(self, make: Callable[[], Matcher]) -> None:
        self._make = make

    @cached_property
    def started(self) -> Future[Matcher]:
        """Starts it."""
        made: Future[Matcher] = Future()

        def work() -> None:
            try:
                made.set_result(self._make())
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=work, name="ddtree-matcher", daemon=True).start()
        return made
