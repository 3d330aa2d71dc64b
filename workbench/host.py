"""Time the native host work of one round, and the same heap in plain Python for comparison.

    python -m workbench host

Medians of one call through Python, in microseconds, for L = 15 draft positions and K = B candidates, past = 2048.
Results are compared before anything is timed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from ddtree_trt import _native

POSITIONS = 15
PAST = 2048
BUDGETS = (16, 64, 256, 1024)
TIME_PER_CASE_S = 0.3
HEADS = ("B", "build_tree", "in Python", "ratio", "packed_mask", "walk")


def draft(width: int) -> tuple[np.ndarray, np.ndarray]:
    """log_probs [L, K] and token_ids [L, K] of a drafter that grows less certain along the block."""
    rng = np.random.default_rng(0)
    sharpness = np.linspace(4.0, 1.5, POSITIONS)[:, None]
    logits = -np.sort(-rng.normal(size=(POSITIONS, width)) * sharpness, axis=1)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    token_ids = np.argsort(rng.random((POSITIONS, width)), axis=1)
    return np.ascontiguousarray(log_probs, np.float32), token_ids.astype(np.int32)


def heap_in_python(log_probs: np.ndarray, token_ids: np.ndarray, budget: int) -> tuple[list[int], list[int]]:
    """Algorithm 1 with heapq: token_ids [n] and parents [n+1]."""
    rows, tokens = log_probs.tolist(), token_ids.tolist()
    length, width = log_probs.shape
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-rows[0][0], (0,), 0, 0.0)]
    picked: list[int] = []
    parents = [-1]
    while heap and len(picked) < budget:
        negative, ranks, parent, above = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        picked.append(tokens[depth - 1][rank])
        parents.append(parent)
        if rank + 1 < width:
            weight = above + rows[depth - 1][rank + 1]
            heapq.heappush(heap, (-weight, (*ranks[:-1], rank + 1), parent, above))
        if depth < length:
            heapq.heappush(heap, (-(rows[depth][0] - negative), (*ranks, 0), len(picked), -negative))
    return picked, parents


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
    if heap_in_python(log_probs, token_ids, budget) != (picked.tolist(), parents.tolist()):
        raise SystemExit(f"budget {budget}: the native tree differs from the plain heap")

    tree_tokens = len(parents)
    choices = np.zeros(tree_tokens, np.int64)
    node = tree_tokens - 1  # the target's choices follow the path to the last node added
    while node > 0:
        choices[parents[node]] = picked[node - 1]
        node = parents[node]
    return [
        median_us(lambda: heap_in_python(log_probs, token_ids, budget)),
        median_us(lambda: _native.build_tree(log_probs, token_ids, budget)),
        median_us(lambda: _native.packed_mask(parents)),
        median_us(lambda: _native.walk(parents, picked, choices)),
    ]


def measure_compaction() -> float:
    """Microseconds to keep 7 scattered rows in 28 layers of keys and values, 8 heads of 128 floats."""
    shape = (8, 128, PAST + 64, False)
    cache = np.zeros((28, 1, _native.cache_bytes(*shape)), np.uint8)
    keep = np.array([0, 1, 4, 9, 17, 30, 52], np.int32)
    return median_us(lambda: _native.compact_cache(cache, 0, *shape, PAST, keep))


def main() -> None:
    print("Median µs per call\n" + "".join(f"{head:>15}" for head in HEADS))
    for budget in BUDGETS:
        plain, *native = measure(budget)
        ratio = f"{plain / native[0]:.0f}×"
        cells = [str(budget), f"{native[0]:,.1f}", f"{plain:,.1f}", ratio, *(f"{us:,.1f}" for us in native[1:])]
        print("".join(f"{cell:>15}" for cell in cells))
    print(f"compact_cache, 28 layers × 7 rows of 8 heads × 128 floats: {measure_compaction():,.1f} µs")
