"""Outputs of requests. The names are vLLM's. Printed, they show texts and counts, and no lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.stats import RequestMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, or in a stream its new part."""

    index: int
    text: str
    token_ids: list[int] = field(repr=False)
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string met; None for an end-of-text token
    error: str | None = None  # why it ended with "error": what its constraint came to while it ran
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of `logprobs`."""
        return None if self.logprobs is None else sum(t.logprob for t in self.logprobs)

    def joined(self, later: CompletionOutput) -> CompletionOutput:
        """This part of a stream joined with the next one."""
        probs = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        return replace(later, text=self.text + later.text, token_ids=self.token_ids + later.token_ids, logprobs=probs)


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestOutput:
    """A request's completions, metrics and token counts."""

    request_id: str
    prompt: str | None  # None when it was given as token ids
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)
    usage: Usage
    # None for the first token, which no row predicts
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)

    def joined(self, later: RequestOutput) -> RequestOutput:
        """This part of a stream joined with the next one; all parts joined are the finished output."""
        outputs = {o.index: o for o in self.outputs}
        for o in later.outputs:
            outputs[o.index] = outputs[o.index].joined(o) if o.index in outputs else o
        return replace(later, outputs=[outputs[index] for index in sorted(outputs)])
