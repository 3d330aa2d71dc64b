"""Latency profiles made by a formula."""

from __future__ import annotations

from ddtree_trt.runtime.decoding.latency import ContextCost, LatencyProfile

SIZES = (1, 2, 3, 5, 9, 17, 33, 65)


def make_profile(draft_s: float = 0.5, slope: float = 0.05) -> LatencyProfile:
    """Verifying costs 1 + slope · (T − 1) seconds at short contexts and half as much again at long ones."""
    verify = tuple(1 + slope * (t - 1) for t in SIZES)
    long = tuple(1.5 * v for v in verify)
    costs = (ContextCost(64, draft_s, SIZES, verify), ContextCost(1024, draft_s, SIZES, long))
    return LatencyProfile("fingerprint", "machine", costs)
