"""Answers in OpenAI's shapes, with this server's figures in a further field `metrics`; whole, or as a stream of events.

Plain dictionaries: the types of the package `openai` are for reading answers, take half a second to import, and send
every field that was not given as null.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from ddtree_trt.runtime.async_llm import Submission, iterate_parts
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.runtime.stats import RequestMetrics, merge
from ddtree_trt.serve.errors import ApiError, as_api_error
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest
from ddtree_trt.serve.service import Service

Answer = dict[str, Any]
# (index of the prompt, its output or a part, one completion of it) → choices to send, in order
Choices = Callable[[int, RequestOutput, CompletionOutput], list[Answer]]

_FIGURES = (
    "rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_acceptance_length", "acceptance_histogram",
    "acceptance_by_depth", "mean_budget", "time_to_first_token_s", "time_per_output_token_s", "stage_s", "on_device",
    "why_host",
)  # fmt: skip
# By vLLM's names, in milliseconds: from getting a slot to the first token, from there to the last, …
_MILLISECONDS = {
    "time_to_first_token_ms": "prefill_time_s",
    "generation_time_ms": "decode_time_s",
    "queue_time_ms": "queue_time_s",
    "mean_itl_ms": "time_per_output_token_s",
}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def finish_reason(reason: str | None) -> str | None:
    """The reason in OpenAI's terms. Raises ApiError for "abort", which happens when the server ends the request."""
    if reason == "abort":
        raise ApiError(503, "the request was ended by the server", code="aborted")
    return reason


def json_logprob(logprob: float) -> float:
    """A log-probability for JSON, which has no −∞: at least −9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def usage(outputs: Sequence[RequestOutput]) -> Answer:
    prompt = sum(o.usage.prompt_tokens for o in outputs)
    completion = sum(o.usage.completion_tokens for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.usage.cached_tokens for o in outputs)},
    }


def acceptance(outputs: Sequence[RequestOutput], longest_draft: int) -> Answer:
    """Acceptance of a request's drafts, of up to `longest_draft` positions, and its times. The fields behind `why_host`
    are those of vLLM's object `metrics`: they describe one sequence, and are null for a request of several."""
    metrics = merge(o.metrics for o in outputs)
    answer = {name: getattr(metrics, name) for name in _FIGURES}
    if metrics.parts:  # several sequences
        return answer | dict.fromkeys(["speculative_decoding", *_MILLISECONDS, "tokens_per_second"])
    times = {name: getattr(metrics, ours) for name, ours in _MILLISECONDS.items()}
    seconds = metrics.inference_time_s
    return {
        **answer,
        "speculative_decoding": _speculative_decoding(metrics, longest_draft),
        **{name: None if value is None else 1000 * value for name, value in times.items()},
        "tokens_per_second": metrics.output_tokens / seconds if seconds else None,
    }


def _speculative_decoding(metrics: RequestMetrics, longest_draft: int) -> Answer:
    """Acceptance in vLLM's terms: a step is a round that verified draft tokens, item j of the histogram counts the
    steps that accepted j of them, and bonus tokens count in the mean length only."""
    histogram, steps = metrics.accepted_histogram(longest_draft), metrics.drafting_rounds
    return {
        "mean_acceptance_length": 1 + metrics.accepted_tokens / steps if steps else 1.0,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": metrics.accepted_tokens,
        "num_draft_tokens": metrics.drafted_tokens,
        "num_spec_tokens": len(histogram) - 1,
    }


async def respond(
    service: Service,
    body: ChatRequest | CompletionRequest,
    request_id: str,
    submissions: Sequence[Submission],
    kinds: tuple[str, str],
    whole: Choices,
    parts: Choices,
) -> Response:
    """The answer to a request: of objects `kinds`, one of `whole` choices, or a stream of those of its `parts`."""
    kind, longest = kinds[bool(body.stream)], service.longest_draft
    begin = {"id": request_id, "object": kind, "created": int(time.time()), "model": service.model_name}
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return stream_response(_events(submissions, begin, parts, with_usage, longest), request_id)
    outputs = [await submission.result() for submission in submissions]
    choices = [c for place, output in enumerate(outputs) for o in output.outputs for c in whole(place, output, o)]
    answer = {**begin, "choices": choices, "usage": usage(outputs), "metrics": acceptance(outputs, longest)}
    return JSONResponse(answer, headers={"X-Request-Id": request_id})


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: Answer | str) -> str:
    return f"data: {data if isinstance(data, str) else _json(data)}\n\n"


def stream_response(events: AsyncIterator[str], request_id: str) -> StreamingResponse:
    """Events as they come. What goes wrong among them is the last one, since the status has been sent by then."""

    async def with_error() -> AsyncIterator[str]:
        try:
            async for text in events:
                yield text
            yield event("[DONE]")
        except Exception as error:
            yield event(as_api_error(error).body())

    # A buffering proxy would delay the stream until its end.
    headers = {"X-Request-Id": request_id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(with_error(), media_type="text/event-stream", headers=headers)


async def _events(
    submissions: Sequence[Submission], begin: Answer, choices: Choices, with_usage: bool, longest_draft: int
) -> AsyncIterator[str]:
    """The submissions' parts as events, and one more with the usage where it is wanted."""
    latest: dict[int, RequestOutput] = {}
    head, tail = f'{_json(begin)[:-1]},"choices":[', '],"usage":null' if with_usage else "]"  # null as OpenAI has it
    async for place, part in iterate_parts(submissions):
        latest[place] = part
        texts = [head + _json(c) + tail for output in part.outputs for c in choices(place, part, output)]
        if part.finished and all(s.finished for s in submissions):
            metrics = acceptance(list(latest.values()), longest_draft)
            if with_usage:  # vLLM's object is sent once, with the usage, as its readers expect
                metrics["speculative_decoding"] = None
            texts[-1] += f',"metrics":{_json(metrics)}'
        if texts:
            yield "".join([f"data: {text}}}\n\n" for text in texts])
    if with_usage:
        outputs = list(latest.values())
        yield event({**begin, "choices": [], "usage": usage(outputs), "metrics": acceptance(outputs, longest_draft)})
