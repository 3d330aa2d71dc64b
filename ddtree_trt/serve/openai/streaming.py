"""Server-sent events of both endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import StreamingResponse

from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.runtime.submission import Submission, iterate_parts
from ddtree_trt.serve.errors import as_api_error, error_event
from ddtree_trt.serve.openai.responses import DONE, Answer, event
from ddtree_trt.serve.service import Service

# (index of the prompt, its part, one completion of the part) → answers to send, in order
Chunks = Callable[[int, RequestOutput, CompletionOutput], list[Answer]]


def stream(
    service: Service, submissions: Sequence[Submission], chunks: Chunks, last: Answer | None, request_id: str
) -> StreamingResponse:
    """Stream the submissions' parts. `last`, if given, is sent after them with the usage and the metrics."""
    return StreamingResponse(
        _events(service, submissions, chunks, last),
        media_type="text/event-stream",
        # A buffering proxy would delay the stream until its end.
        headers={"X-Request-Id": request_id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(
    service: Service, submissions: Sequence[Submission], chunks: Chunks, last: Answer | None
) -> AsyncIterator[str]:
    latest: dict[int, RequestOutput] = {}
    try:
        async for place, part in iterate_parts(submissions):
            latest[place] = part
            answers = [a for output in part.outputs for a in chunks(place, part, output)]
            if last is not None:
                for a in answers:
                    a.usage = None  # sent as null, as OpenAI does
            if all(s.finished for s in submissions):
                metrics = service.acceptance(list(latest.values()))
                if last is not None:  # vLLM's object is sent once, with the usage, as its readers expect
                    metrics.speculative_decoding = None
                answers[-1].metrics = metrics
            if answers:
                yield "".join(event(a.to_json()) for a in answers)
        if last is not None:
            last.usage = service.usage(list(latest.values()))
            last.metrics = service.acceptance(list(latest.values()))
            yield event(last.to_json())
        yield DONE
    except Exception as error:  # the status has been sent, so the error is an event
        yield error_event(as_api_error(error))
