"""Output tensors of responses, made from the runtime's outputs. n is the number of sequences of the request."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.triton.requests import TIMES, Call
from ddtree_trt.triton.settings import Layout

Arrays = dict[str, NDArray[Any]]


class Responder:
    """Makes the responses of one request, in order.

    Texts, finish reasons, token counts and log-probabilities are those of the response alone, so a client adds them up.
    Summed log-probabilities include all earlier responses. Figures of the whole request are in its last response.
    """

    def __init__(self, call: Call, layout: Layout) -> None:
        self._call = call
        self._layout = layout
        self._cumulative = [0.0] * call.params.n
        self._log_probs_wanted = call.params.logprobs is not None and not call.outputs.isdisjoint(
            (layout.cum_log_probs, layout.log_probs)
        )

    def arrays(self, part: RequestOutput) -> Arrays:
        """The wanted output tensors of a part, or of the whole when nothing is streamed.

        text_output and finish_reason are object [n]; other per-sequence tensors are [1, n] or [n], and scalars [1, 1]
        or [1], by layout. Sequences without output in the part have an empty text.
        """
        call, layout, metrics = self._call, self._layout, part.metrics
        found: dict[int, CompletionOutput] = {output.index: output for output in part.outputs}
        outputs = [found.get(i) for i in range(call.params.n)]
        start, counts = call.prompt if call.echo else "", [len(o.token_ids) if o else 0 for o in outputs]
        arrays = {
            "text_output": _strings([start + o.text if o else start for o in outputs]),
            "finish_reason": _strings([(o and o.finish_reason) or layout.unfinished for o in outputs]),
            "num_input_tokens": self._scalar(len(part.prompt_token_ids), layout.count_dtype),
            "num_output_tokens": np.array(counts, layout.count_dtype)
            if layout.counts_per_sequence
            else self._scalar(sum(counts), layout.count_dtype),
        }
        if self._log_probs_wanted:
            tokens = [(o and o.logprobs) or [] for o in outputs]
            for i, sequence in enumerate(tokens):
                self._cumulative[i] += sum(t.logprob for t in sequence)
            arrays[layout.cum_log_probs] = self._row(np.array(self._cumulative, np.float32))
            arrays[layout.log_probs] = self._row(_padded(tokens)) if layout.batched else _as_json(tokens)
        if part.finished:
            arrays["acceptance_rate"] = self._scalar(metrics.acceptance_rate, np.float32)
            arrays["total_accepted_draft_tokens"] = self._scalar(metrics.accepted_tokens, np.int32)
            arrays["total_draft_tokens"] = self._scalar(metrics.drafted_tokens, np.int32)
            for name, time_s in zip(
                TIMES, (metrics.arrival_s, metrics.first_token_s, metrics.last_token_s), strict=True
            ):
                arrays[name] = self._scalar(int((time_s or 0) * 1e9), np.int64)
        return {name: array for name, array in arrays.items() if name in call.outputs}

    def _scalar(self, value: float, dtype: type) -> NDArray[Any]:
        return np.array([[value]] if self._layout.batched else [value], dtype)

    def _row(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[None] if self._layout.batched else array


def _strings(texts: list[str]) -> NDArray[Any]:
    return np.array([text.encode() for text in texts], dtype=object)


def _padded(tokens: list[list[TokenLogprob]]) -> NDArray[np.float32]:
    """float32 [n, longest], zeros behind the shorter ones."""
    longest = max(map(len, tokens))
    return np.array([[t.logprob for t in seq] + [0.0] * (longest - len(seq)) for seq in tokens], np.float32)


def _as_json(tokens: list[list[TokenLogprob]]) -> NDArray[Any]:
    """Per sequence a JSON list with, for each token, {token id: {logprob, rank}} of it and its alternatives."""

    def entry(t: TokenLogprob) -> dict[int, dict[str, float]]:
        top = {token: {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(t.top, 1)}
        return {t.token_id: {"logprob": t.logprob, "rank": t.rank}, **top}

    return _strings([json.dumps([entry(t) for t in sequence]) for sequence in tokens])
