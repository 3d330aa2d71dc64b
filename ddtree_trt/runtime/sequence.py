"""The state of one completion: its tokens, text, end and figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddtree_trt.runtime.decoding.budget.policy import Budget
from ddtree_trt.runtime.decoding.methods import METHODS, Method
from ddtree_trt.runtime.decoding.routing import Route
from ddtree_trt.runtime.decoding.sampling import Row, Sampler, TokenLogprob, logprob
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.stats import RequestMetrics
from ddtree_trt.runtime.text.codec import TextStream


@dataclass
class Sequence:
    """One completion. The scheduler sets `slot`, the decode loop appends tokens, and readers take the new output."""

    index: int  # of the request's n completions
    prompt: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    capacity: int  # prompt and output tokens the engine can hold
    sampler: Sampler
    stream: TextStream
    budget: Budget
    route: Route  # one for the whole request; the metrics copy it
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    slot: int | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    bonus_token: int = -1  # the latest token emitted, not yet in the cache
    on_round: Callable[[Any], None] | None = None  # called with a loop.Round after each round
    echo: str = ""  # put in front of the text
    method: Method = field(init=False)  # the method named by params.method
    max_tokens: int = field(init=False)  # of output: those asked for, or as many as fit
    _shown_tokens: int = 0
    _shown_chars: int = 0
    _shown_end: bool = False
    _shown_any: bool = False

    def __post_init__(self) -> None:
        self.method = METHODS[self.params.method]
        self.metrics.prompt_tokens = len(self.prompt)
        self.metrics.on_device = self.route.on_device
        self.metrics.why_host = self.route.host_reason
        self.max_tokens = min(self.params.wanted_tokens, self.capacity - len(self.prompt))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def drafts(self) -> bool:
        """Whether rounds of this sequence may use the drafter."""
        return self.method.drafts and self.params.tree_budget != 0

    @property
    def tokens_left(self) -> int:
        """Most tokens that may still be emitted."""
        return self.max_tokens - len(self.output)

    def append(self, token: int, logits: Row | None) -> bool:
        """Emit one token; returns whether the sequence continues. `logits` [V] is the row the token was chosen from."""
        now = time.perf_counter()
        self.metrics.first_token_s = self.metrics.first_token_s or now
        self.metrics.last_token_s = now
        self.bonus_token = token
        self.output.append(token)
        self.sampler.observe(token)
        if self.params.logprobs is not None and logits is not None:
            self.logprobs.append(logprob(logits, token, self.params.logprobs))
        enough = len(self.output) >= self.params.min_tokens
        closed = self.sampler.matcher is not None and self.sampler.matcher.ended
        ends = (enough or closed) and (token in self.eos_ids or token in self.params.stop_token_ids)
        silent = ends and not self.params.include_stop_str_in_output
        stop = self.stream.push(token, silent=silent, may_stop=enough)
        if stop is not None:
            self._finish("stop", stop)
            self._drop_tokens()
        elif ends:
            self._finish("stop", None if token in self.eos_ids else token)
        elif closed:
            self._finish("stop", None)
        elif len(self.output) >= self.max_tokens:
            self._finish("length", None)
        self.metrics.output_tokens = len(self.output)
        return not self.finished

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if not isinstance(stop_reason, str):
            self.stream.flush()

    def _drop_tokens(self) -> None:
        kept = self.stream.tokens_within(len(self.stream.text))
        del self.output[kept:]
        del self.logprobs[kept:]
        del self.stream.starts[kept:]

    def abort(self, error: Exception | None = None) -> None:
        """End an unfinished sequence: its caller cancelled it, or the engine failed with `error`."""
        if not self.finished:
            self.error = error
            self._finish("abort" if error is None else "error", None)

    def take(self) -> CompletionOutput | None:
        """The output since the last call: text that can no longer become a stop string, and its tokens; None when
        nothing is new. The finish reason is new once."""
        end, tokens = self._settled()
        start, first = self._shown_chars, self._shown_tokens
        if (end, tokens) == (start, first) and self.finished == self._shown_end:
            return None
        echo = "" if self._shown_any else self.echo
        self._shown_chars, self._shown_tokens = end, tokens
        self._shown_end = self.finished
        self._shown_any = True
        return self._output(echo + self.stream.text[start:end], first, tokens)

    def output_so_far(self) -> CompletionOutput:
        """The completion from its beginning, as far as it is settled."""
        end, tokens = self._settled()
        return self._output(self.echo + self.stream.text[:end], 0, tokens)

    def _settled(self) -> tuple[int, int]:
        """Counts of characters and tokens that no later stop string can remove."""
        if self.finished:
            return len(self.stream.text), len(self.output)
        end = self.stream.safe_length()
        return end, self.stream.tokens_within(end)

    def _output(self, text: str, first: int, last: int) -> CompletionOutput:
        logprobs = None if self.params.logprobs is None else self.logprobs[first:last]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.output[first:last],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=None if self.error is None else str(self.error),
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(t.logprob for t in logprobs),
        )
