"""NumPy reference of what the CUDA kernels compute: written to be read, not to be fast.

Letters as in `ddtree_trt.plugins`. Control values in device memory are clamped here exactly as the kernels clamp
them, so that garbage has a defined result too.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.plugins import MaskMode

Int32 = NDArray[np.int32]
Float = NDArray[np.floating]


def random_parents(rng: np.random.Generator, tokens: int) -> Int32:
    """int32 [T] of a tree whose nodes each hang below any earlier one."""
    return np.array([-1, *(rng.integers(0, i) for i in range(1, tokens))], np.int32)


def visible(mode: MaskMode, tokens: int, tree_mask: Int32 | None = None) -> NDArray[np.bool_]:
    """bool [T, T]: whether token i sees new token j. In mode TREE any tree_mask [T, W] will do: j > i is hidden."""
    if mode is MaskMode.NONE:
        return np.ones((tokens, tokens), bool)
    earlier = np.tri(tokens, dtype=bool)
    if mode is MaskMode.CAUSAL:
        return earlier
    if tree_mask is None:
        raise ValueError("mode TREE needs a tree_mask int32 [T, W]")
    bits = np.unpackbits(np.ascontiguousarray(tree_mask).view(np.uint8), axis=1, bitorder="little")
    return earlier & bits[:, :tokens].astype(bool)


def attention(
    q: Float, k: Float, v: Float, past_k: Float, past_v: Float, slot_ids: Int32, past_len: Int32,
    tree_mask: Int32 | None, mode: MaskMode, scale: float,
) -> tuple[NDArray[np.float64], Float, Float]:  # fmt: skip
    """(attn [N, T, Hq, D] float64, present_k, present_v): the caches are copies with the T new rows appended. A token
    that sees nothing (no past and an empty mask row) gets zeros."""
    sequences, tokens, q_heads, _ = q.shape
    slots, kv_heads, capacity, _ = past_k.shape
    group = q_heads // kv_heads
    present_k, present_v = past_k.copy(), past_v.copy()
    out = np.zeros(q.shape)
    for n in range(sequences):
        slot = int(np.clip(slot_ids[n], 0, slots - 1))
        past = int(np.clip(past_len[n], 0, capacity - tokens))
        seen = visible(mode, tokens, None if tree_mask is None else tree_mask[n])
        seen = np.concatenate((np.ones((tokens, past), bool), seen), axis=1)
        for head in range(kv_heads):
            rows = slice(past, past + tokens)
            present_k[slot, head, rows] = k[n, :, head]
            present_v[slot, head, rows] = v[n, :, head]
            keys = np.concatenate((past_k[slot, head, :past], k[n, :, head])).astype(np.float64)
            values = np.concatenate((past_v[slot, head, :past], v[n, :, head])).astype(np.float64)
            for query_head in range(head * group, (head + 1) * group):
                scores = np.where(seen, q[n, :, query_head].astype(np.float64) @ keys.T * scale, -np.inf)
                largest = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
                total = weights.sum(axis=1, keepdims=True)
                out[n, :, query_head] = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)) @ values
    return out, present_k, present_v


def compact(cache: NDArray[Any], slot_ids: Int32, past_len: Int32, keep: Int32, keep_count: Int32) -> NDArray[Any]:
    """A copy of cache [planes, slots, Hkv, S, D] where row past_len + keep[j] became row past_len + j. The first entry
    of keep [N, M] that does not rise, is negative or lies outside the slot, ends the list."""
    result = cache.copy()
    _, slots, _, capacity, _ = cache.shape
    for n in range(len(slot_ids)):
        slot = int(np.clip(slot_ids[n], 0, slots - 1))
        start = int(np.clip(past_len[n], 0, capacity))
        kept: list[int] = []
        for row in keep[n, : np.clip(keep_count[n], 0, keep.shape[1])].tolist():
            if row <= (kept[-1] if kept else -1) or row >= capacity - start:
                break
            kept.append(row)
        result[:, slot, :, start : start + len(kept)] = cache[:, slot][:, :, [start + row for row in kept]]
    return result


def draft_top(logits: Float, k: int, *, normalised: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k largest of logits [R, V], falling, of equal ones the lower id first, NaN where −inf is, and their ids; as
    they are, or as log-probabilities."""
    ids = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), axis=1, kind="stable")[:, :k]
    wide = logits.astype(np.float64)
    best = np.take_along_axis(wide, ids, 1)
    if not normalised:
        return best, ids
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = np.fmax.reduce(wide, axis=1, keepdims=True)
        return best - largest - np.log(np.exp(wide - largest).sum(axis=1, keepdims=True)), ids


def packed_mask(parents: Int32, words: int | None = None) -> Int32:
    """int32 [T, W]: bit j % 32 of word j / 32 of row i is set when j is i or an ancestor of i. A parent that does not
    precede its child ends the climb."""
    tokens = len(parents)
    columns = 32 * (words if words is not None else -(-tokens // 32))
    seen = np.zeros((tokens, columns), np.uint8)
    for row in range(tokens):
        node = row
        while node >= 0:
            seen[row, node] = 1
            node = int(parents[node]) if parents[node] < node else -1
    return np.packbits(seen, axis=1, bitorder="little").view(np.int32)


def choose(logits: Float, positions: Int32, temperatures: Float, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens [N, T] of the largest of logits [N, T, V], each with its token's Gumbel noise for the position behind
    its node's, times the temperature [N]; of equals the first."""
    vocabulary, values = logits.shape[2], np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    for n, (temperature, seed) in enumerate(zip(temperatures.tolist(), seeds.tolist(), strict=True)):
        for row, position in enumerate(positions[n].tolist()):
            if temperature > 0:
                values[n, row] += temperature * _native.gumbel(seed % (1 << 64), position + 1, vocabulary)
    return values.argmax(-1)


def walk(parents: Int32, token_ids: Int32, choices: Int32, count: int) -> list[int]:
    """The accepted path, root first: at each node the first later child whose token is the target's choice there. All
    are [T], the root's token included; nodes at and after `count` are padding."""
    path = [0]
    for node in range(1, min(max(count, 1), len(parents))):
        if parents[node] == path[-1] and token_ids[node] == choices[path[-1]]:
            path.append(node)
    return path


def commit(
    parents: Int32, token_ids: Int32, choices: Int32, counts: Int32, log_weights: NDArray[np.float32],
    outlook_depths: Int32, slot_ids: Int32, holds: Int32, active: Int32, before: Int32, tapped: NDArray[Any],
    cache: NDArray[Any], waiting: NDArray[Any], states: Int32, result: Int32,
) -> tuple[NDArray[Any], ...]:  # fmt: skip
    """(cache, waiting, states, result), copies, as `ddtree/round.h` says."""
    waiting, states, told = waiting.copy(), states.copy(), []
    longest = result.shape[1] // 2 - 1 - parents.shape[1] - log_weights.shape[1]
    for n, slot in enumerate(np.clip(slot_ids, 0, cache.shape[1] - 1)):
        path = walk(parents[n], token_ids[n], choices[n], int(counts[n]))[:longest]
        keep, length = np.array([path], np.int32), len(path)
        cache = compact(cache, np.array([slot]), before[0, n : n + 1], keep, np.array([length]))
        first = int(np.clip(before[2, n], 0, waiting.shape[1]))
        room = waiting[slot, first : first + length] if holds[n] else waiting[:0, 0]
        room[...] = tapped[n, path[: len(room)]]
        added = [length, 0, length * (holds[n] != 0), choices[n, path[-1]] - before[3, n]]
        states[:, slot] = before[:, n] + (np.array(added) if active[n] else 0)
        padded = path + [-1] * (longest - length)
        said = choices[n, np.maximum(padded, 0)]
        seen = log_weights[n].view(np.int32), outlook_depths[n]
        told.append(np.concatenate(([counts[n], length], said, padded, token_ids[n], parents[n], *seen)))
    return cache, waiting, states, np.array(told, np.int32)


def random_commit(rng: np.random.Generator, tokens: int, longest: int, outlook: int = 5) -> dict[str, NDArray[Any]]:
    """The arguments of `commit` for three of five slots. Few distinct tokens, so that walks are long and siblings may
    even share one."""
    n, slots, width = 3, 5, 24
    near = [[-1, *(int(rng.integers(max(0, i - 9), i)) for i in range(1, tokens))] for _ in range(n)]
    tree = rng.integers(0, 3, (2, n, tokens))
    arrays: dict[str, Any] = {
        "parents": near, "token_ids": tree[0], "choices": tree[1], "counts": rng.integers(1, tokens + 1, n),
        "log_weights": rng.normal(size=(n, outlook)).astype(np.float32),
        "outlook_depths": rng.integers(0, 9, (n, outlook)), "slot_ids": rng.permutation(slots)[:n],
        "holds": rng.integers(0, 2, n), "active": rng.integers(0, 2, n), "before": rng.integers(0, 9, (4, n)),
        "tapped": rng.integers(0, 2**15, (n, tokens, width)).astype(np.int16),
        "cache": rng.integers(0, 2**15, (4, slots, 2, tokens + 9, 8)).astype(np.int16),
        "waiting": rng.integers(0, 2**15, (slots, longest + 9, width)).astype(np.int16),
        "states": rng.integers(0, 99, (4, slots)), "result": np.zeros((n, 2 * (1 + longest + tokens + outlook))),
    }  # fmt: skip
    return {
        k: a if getattr(a, "dtype", None) in (np.int16, np.float32) else np.array(a, np.int32)
        for k, a in arrays.items()
    }


def delta_tree(
    mixed: Float, log_decays: Float, steps: Float, parents: Int32, states: Float, heads: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(results [T, Hv, Dv], the state [T, Hv, Dk, Dv] behind each node) of one sequence by the recurrence, float64, of
    mixed [T, C], log_decays and steps [T, Hv], parents [T], states [Hv, Dk, Dv]; heads are Hk and Dk."""
    (key_heads, dim), (value_heads, _, width) = heads, states.shape
    q, k, v = np.split(mixed.astype(np.float64), [key_heads * dim, 2 * key_heads * dim], -1)
    q, k = (x.reshape(-1, key_heads, dim).repeat(value_heads // key_heads, 1) for x in (q, k))
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(-1, value_heads, width)
    behind = np.empty((len(mixed), *states.shape))
    for j, parent in enumerate(parents):
        state = (states if not 0 <= parent < j else behind[parent]) * np.exp(log_decays[j].astype(float))[:, None, None]
        change = steps[j, :, None] * (v[j] - np.einsum("hkv,hk->hv", state, k[j]))
        behind[j] = state + k[j, :, :, None] * change[:, None]
    return np.einsum("thkv,thk->thv", behind, q) * dim**-0.5, behind
