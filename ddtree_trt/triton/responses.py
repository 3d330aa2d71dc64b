"""Output tensors of responses, made from the runtime's outputs. n is the number of sequences of the request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.triton.layouts import TIMES, Layout, Tensor
from ddtree_trt.triton.requests import Call

Arrays = dict[str, NDArray[Any]]
_NUMPY = {"FP32": np.float32, "INT32": np.int32, "UINT32": np.uint32, "INT64": np.int64}


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

        Texts are object [n]; other per-sequence tensors are [1, n] or [n], and scalars [1, 1] or [1], by layout.
        Sequences without output in the part have an empty text.
        """
        call, layout, metrics = self._call, self._layout, part.metrics
        found: dict[int, CompletionOutput] = {output.index: output for output in part.outputs}
        outputs = [found.get(i) for i in range(call.params.n)]
        start, counts = call.prompt if call.echo else "", [len(o.token_ids) if o else 0 for o in outputs]
        values: dict[str, Sequence[Any]] = {
            "text_output": [start + o.text if o else start for o in outputs],
            "finish_reason": [(o and o.finish_reason) or layout.unfinished for o in outputs],
            "num_input_tokens": [len(part.prompt_token_ids)],
            "num_output_tokens": counts if layout.outputs["num_output_tokens"].dims == (-1,) else [sum(counts)],
        }
        if self._log_probs_wanted:
            tokens = [(o and o.logprobs) or [] for o in outputs]
            for i, sequence in enumerate(tokens):
                self._cumulative[i] += sum(t.logprob for t in sequence)
            values[layout.cum_log_probs] = self._cumulative
            values[layout.log_probs] = _padded(tokens) if layout.batched else _as_json(tokens)
        if part.finished:
            values["acceptance_rate"] = [metrics.acceptance_rate]
            values["total_accepted_draft_tokens"] = [metrics.accepted_tokens]
            values["total_draft_tokens"] = [metrics.drafted_tokens]
            times_s = (metrics.arrival_s, metrics.first_token_s, metrics.last_token_s)
            values |= {name: [int((time_s or 0) * 1e9)] for name, time_s in zip(TIMES, times_s, strict=True)}
        return {name: self._array(layout.outputs[name], v) for name, v in values.items() if name in call.outputs}

    def _array(self, output: Tensor, values: Sequence[Any]) -> NDArray[Any]:
        if output.dtype == "STRING":
            return np.array([text.encode() for text in values], dtype=object)
        array = np.array(values, _NUMPY[output.dtype])
        return array[None] if self._layout.batched else array


def _padded(tokens: list[list[TokenLogprob]]) -> list[list[float]]:
    """[n, longest], zeros behind the shorter ones."""
    longest = max(map(len, tokens))
    return [[t.logprob for t in sequence] + [0.0] * (longest - len(sequence)) for sequence in tokens]


def _as_json(tokens: list[list[TokenLogprob]]) -> list[str]:
    """Per sequence a JSON list with, for each token, {token id: {logprob, rank}} of it and its alternatives."""

    def entry(t: TokenLogprob) -> dict[int, dict[str, float]]:
        top = {token: {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(t.top, 1)}
        return {t.token_id: {"logprob": t.logprob, "rank": t.rank}, **top}

    return [json.dumps([entry(t) for t in sequence]) for sequence in tokens]
