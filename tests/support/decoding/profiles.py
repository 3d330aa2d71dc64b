"""Latency profiles made by a formula."""

from __future__ import annotations

from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile

SIZES = (1, 2, 3, 5, 9, 17, 33, 65)


def make_profile(draft_s: float = 0.5, slope: float = 0.05) -> LatencyProfile:
    """Verifying costs 1 + slope · (T − 1) seconds at short contexts and half as much again at long ones."""
    verify = tuple(1 + slope * (t - 1) for t in SIZES)
    long = tuple(1.5 * v for v in verify)
    costs = (ContextCost(64, draft_s, SIZES, verify), ContextCost(1024, draft_s, SIZES, long))
    return LatencyProfile("fingerprint", "machine", costs)


def make_batched_profile(most: int, *, draft_s: float = 0.2, slope: float = 0.02, free_rows: int = 1) -> LatencyProfile:
    """Passes over up to `most` slots. A verification of N · T rows costs 1 + slope · (rows − free_rows) seconds, and no
    less than 1; a draft of k slots a fifth of draft_s more for each slot after the first."""

    def cost(slots: int) -> ContextCost:
        verify_s = tuple(1 + slope * max(0, slots * t - free_rows) for t in SIZES)
        return ContextCost(64, draft_s * (0.8 + 0.2 * slots), SIZES, verify_s, slots=slots)

    counts = [n for n in (2, 4, 8, 16, 32, 64) if n <= most]
    return LatencyProfile("fingerprint", "machine", (cost(1),), tuple(cost(n) for n in counts))
