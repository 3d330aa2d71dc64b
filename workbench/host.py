"""Time the native host work of one round.

    python -m workbench host

Medians of one call through Python, in microseconds, for L = 15 draft positions and K = B candidates, past = 2048.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ddtree_trt import _native

POSITIONS = 15
PAST = 2048
BUDGETS = (16, 64, 256, 1024)
TIME_PER_CASE_S = 0.3
HEADS = ("B", "build_tree", "packed_mask", "walk")


def draft(width: int) -> tuple[np.ndarray, np.ndarray]:
    """log_probs [L, K] and token_ids [L, K] of a drafter that grows less certain along the block."""
    rng = np.random.default_rng(0)
    sharpness = np.linspace(4.0, 1.5, POSITIONS)[:, None]
    logits = -np.sort(-rng.normal(size=(POSITIONS, width)) * sharpness, axis=1)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    token_ids = np.argsort(rng.random((POSITIONS, width)), axis=1)
    return np.ascontiguousarray(log_probs, np.float32), token_ids.astype(np.int32)


def median_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call."""
    call()
    samples_ns: list[int] = []
    until = time.perf_counter() + TIME_PER_CASE_S
    while time.perf_counter() < until or len(samples_ns) < 5:
        begin = time.perf_counter_ns()
        call()
        samples_ns.append(time.perf_counter_ns() - begin)
    return float(np.median(samples_ns)) / 1e3


def measure(budget: int) -> list[float]:
    """Microseconds of each column of the table."""
    log_probs, token_ids = draft(budget)
    picked, _, parents, _ = _native.build_tree(log_probs, token_ids, budget)
    tree_tokens = len(parents)
    choices = np.zeros(tree_tokens, np.int64)
    node = tree_tokens - 1  # the target's choices follow the path to the last node added
    while node > 0:
        choices[parents[node]] = picked[node - 1]
        node = parents[node]
    return [
        median_us(lambda: _native.build_tree(log_probs, token_ids, budget)),
        median_us(lambda: _native.packed_mask(parents)),
        median_us(lambda: _native.walk(parents, picked, choices)),
    ]


def measure_compaction() -> float:
    """Microseconds to keep 7 scattered rows in 28 layers of keys and values, 8 heads of 128 floats."""
    shape = (128, PAST + 64, False)
    cache = np.zeros((28, 1, 8, (PAST + 64) * 2 * 128 * 4), np.uint8)
    keep = np.array([0, 1, 4, 9, 17, 30, 52], np.int32)
    return median_us(lambda: _native.compact_cache(cache, 0, *shape, PAST, keep))


def main() -> None:
    print("Median µs per call\n" + "".join(f"{head:>15}" for head in HEADS))
    for budget in BUDGETS:
        print(f"{budget:>15}" + "".join(f"{us:>15,.1f}" for us in measure(budget)))
    print(f"compact_cache, 28 layers × 7 rows of 8 heads × 128 floats: {measure_compaction():,.1f} µs")
