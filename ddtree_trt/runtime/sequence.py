"""The state of one completion: its tokens, text, end and figures.

The thread that decodes writes tokens, then the reason of their end, and says at last that it is done. Another thread
may read meanwhile what is settled, and makes the text of it: decoding makes none but where stop strings are sought.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ddtree_trt.runtime.decoding.budget.policy import Budget
from ddtree_trt.runtime.decoding.methods import METHODS, Method
from ddtree_trt.runtime.decoding.sampling import Row, Sampler, TokenLogprob, logprob
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.stats import RequestMetrics
from ddtree_trt.runtime.text.codec import TextStream


@dataclass(eq=False)
class Sequence:
    """One completion. The scheduler sets `slot` and `released`, the decode loop emits tokens, readers take them."""

    index: int  # of the request's n completions
    prompt: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    capacity: int  # prompt and output tokens the engine can hold
    sampler: Sampler
    stream: TextStream
    budget: Budget
    why_host: str | None  # why its rounds run on the host; None where they stay on the device
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    slot: int | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    released: bool = False  # whether it has ended, and nobody will change it
    bonus_token: int = -1  # the latest token emitted, not yet in the cache
    on_round: Callable[[Any], None] | None = None  # called with a loop.Round after each round
    echo: str = ""  # put in front of the text
    owner: Any = None  # of who reads it on another thread
    shown_end: bool = False  # whether its end has been taken
    method: Method = field(init=False)  # the method named by params.method
    drafts: bool = field(init=False)  # whether its rounds may use the drafter
    on_device: bool = field(init=False)  # whether its rounds stay on the device
    max_tokens: int = field(init=False)  # of output: those asked for, or as many as fit
    _silent: int = 0  # tokens at the end that add no text
    _shown: tuple[int, int] = (0, 0)  # characters and tokens
    _shown_any: bool = False

    def __post_init__(self) -> None:
        self.method = METHODS[self.params.method]
        self.drafts = self.method.drafts and self.params.tree_budget != 0
        self._ends = self.eos_ids | set(self.params.stop_token_ids)
        self.metrics.prompt_tokens = len(self.prompt)
        self.metrics.on_device = self.on_device = self.why_host is None
        self.metrics.why_host = self.why_host
        self.max_tokens = min(self.params.wanted_tokens, self.capacity - len(self.prompt))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, logits: Row | None) -> bool:
        """Emit one token; returns whether the sequence continues. `logits` [V] is the row the token was chosen from."""
        self.extend([token], None if logits is None else (logits,))
        return self.finish_reason is None

    def extend(self, tokens: list[int], rows: Iterable[Row] | None = None) -> int:
        """Emit tokens until the sequence ends; returns how many. `rows`: those of logits [V] they were chosen from."""
        params, metrics, sampler, output = self.params, self.metrics, self.sampler, self.output
        before = len(output)
        size = min(len(tokens), self.max_tokens - before)
        reason: str | None = "length" if before + size == self.max_tokens else None
        why: int | str | None = None
        if sampler.observe(tokens):
            reason = "stop"
        if not self._ends.isdisjoint(tokens):
            # Until min_tokens nothing ends the text, but a constraint that allows only the end.
            first = 0 if reason == "stop" else params.min_tokens - before - 1
            at = next((i for i, t in enumerate(tokens[:size]) if i >= first and t in self._ends), None)
            if at is not None:
                size, reason, why = at + 1, "stop", None if tokens[at] in self.eos_ids else tokens[at]
                self._silent = int(not params.include_stop_str_in_output)
        kept = before + size
        if params.stop:
            said = tokens[: size - self._silent]
            early = max(params.min_tokens - before - 1, 0)
            self.stream.push(said[:early], may_stop=False)
            if stop := self.stream.push(said[early:]):
                size, kept, self._silent, reason, why = stop.tokens - before, stop.kept, 0, "stop", stop.text
        metrics.last_token_s = now = time.perf_counter()
        metrics.first_token_s = metrics.first_token_s or now
        if params.logprobs is not None and rows is not None:
            pairs = zip(tokens[:size], rows, strict=False)
            self.logprobs += [logprob(row, token, params.logprobs) for token, row in pairs]
            del self.logprobs[kept:]
        self.bonus_token = tokens[size - 1]
        output += tokens[: max(kept - before, 0)]
        del output[kept:]
        metrics.output_tokens = len(output)
        self.finish_reason, self.stop_reason = reason, why
        return size

    def abort(self, error: Exception | None = None) -> None:
        """End an unfinished sequence: its caller cancelled it, or the engine failed with `error`."""
        if not self.finished:
            self.error = error
            self.finish_reason = "abort" if error is None else "error"

    def take(self) -> CompletionOutput | None:
        """The output since the last call: text that can no longer become a stop string, and its tokens; None when
        nothing is new. The finish reason is new once. Any thread may call it, one at a time."""
        ended, first = self.released, self._shown
        settled = self._settled(ended)
        if settled == first and ended == self.shown_end:
            return None
        echo = "" if self._shown_any else self.echo
        self._shown, self.shown_end, self._shown_any = settled, ended, True
        return self._output(echo, first, settled, ended)

    def output_so_far(self) -> CompletionOutput:
        return self._output(self.echo, (0, 0), self._settled(self.released), self.released)

    def _settled(self, ended: bool) -> tuple[int, int]:
        """Counts of characters and tokens that no later stop string can remove."""
        stream, count = self.stream, len(self.output)
        if not self.params.stop:
            stream.push(self.output[len(stream.tokens) : count - self._silent])
        if ended and not isinstance(self.stop_reason, str):
            stream.flush()
        if ended or not self.params.stop:
            return len(stream.text), count
        characters, tokens = stream.settled()
        return characters, min(tokens, count)

    def _output(self, echo: str, first: tuple[int, int], last: tuple[int, int], ended: bool) -> CompletionOutput:
        """The output between two counts of characters and tokens."""
        return CompletionOutput(
            index=self.index,
            text=echo + self.stream.text[first[0] : last[0]],
            token_ids=self.output[first[1] : last[1]],
            finish_reason=self.finish_reason if ended else None,
            stop_reason=self.stop_reason if ended else None,
            error=None if self.error is None else str(self.error),
            logprobs=None if self.params.logprobs is None else self.logprobs[first[1] : last[1]],
        )
