"""A line about every request that ended: how many tokens, and how fast."""

from __future__ import annotations

import logging

from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.stats import merge

_log = logging.getLogger("ddtree_trt.requests")


def show() -> None:
    """Have the lines written to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _log.handlers, _log.propagate = [handler], False
    _log.setLevel(logging.INFO)


def write(request: Request) -> None:
    """Write the line of a request that ended, for whatever reason."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line(request))


def line(request: Request) -> str:
    """What the log says of a request; its sequences are counted together."""
    metrics = merge(sequence.metrics for sequence in request.sequences)
    ends = sorted({"error" if s.error is not None else str(s.finish_reason) for s in request.sequences})
    parts = [f"{metrics.prompt_tokens} prompt tokens, {metrics.cached_tokens} cached", f"{metrics.output_tokens} new"]
    if (first := metrics.time_to_first_token_s) is not None:
        parts.append(f"first after {first:.3f} s")
    if (seconds := metrics.inference_time_s) is not None and seconds > 0:
        parts.append(f"{metrics.output_tokens / seconds:.1f} tokens/s")
    if metrics.rounds:
        parts.append(f"{metrics.mean_acceptance_length:.1f} a round")
    return f"{request.request_id}: {', '.join(parts)}; {', '.join(ends)}"
