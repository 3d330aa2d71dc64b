"""Host part of ddtree-trt: tree build, masks, walk, budgets, sampling, KV row compaction and the kernels' workspace.

Arrays are read in place and must be C-contiguous with exactly the dtype given; another dtype raises TypeError, another
shape or an impossible value raises ValueError. T = 1 + n tree tokens, node 0 the root with parent -1, parents[i] < i.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Tree = tuple[Int32s, Int32s, Int32s, Doubles]  # token_ids [n], depths [n] (1-based), parents [n+1] and log_weights [n]

def build_tree(
    log_probs: Floats, token_ids: Int32s, budget: int, max_depth: int | None = None, width: int | None = None
) -> Tree:
    """The `budget` most probable prefixes of log_probs [L, K] (rows falling), best first: Algorithm 1 of the paper.

    Prefixes of weight -inf are left out, those of more than `max_depth` tokens, and those with a token that is not one
    of the `width` first of its row. Ties are ordered by rank tuple: the nodes are the first n of all prefixes sorted by
    (-weight, ranks).
    """

def build_linked_tree(
    log_probs: Floats, token_ids: Int32s, next_rows: Int32s,
    budget: int, max_depth: int | None = None, width: int | None = None,
) -> Tree:  # fmt: skip
    """build_tree of rows [R, K], row 0 the root's: the children of a candidate are the row that next_rows names, which
    comes after its own; -1 is none."""

def build_bilinear_tree(
    unary: Floats, token_ids: Int32s, left: Floats, right: Floats,
    budget: int, max_depth: int | None = None, width: int | None = None,
) -> Tree:  # fmt: skip
    """build_tree of the conditionals log_softmax over b of unary[t, b] + <left[t, a], right[t, b]>, b the candidate of
    position t and a that of t - 1; at t = 0 a is 0. unary and token_ids [L, C], rows of unary falling; left and right
    [L, C, r]. The ranks that ties are ordered by are those of the conditionals, of equal ones the lower b first."""

def bilinear_rows(
    unary: Floats, token_ids: Int32s, left: Floats, right: Floats, rows: Int32s
) -> tuple[Floats, Int32s, Int32s]:
    """Conditional rows [F] as build_bilinear_tree has them: log_probs, token_ids, and the row of each candidate's
    children or -1, all [F, C]. Row 0 is the root's, row 1 + t C + a has the children of candidate a of position t."""

def packed_mask(parents: Int32s) -> Int32s:
    """[T, ceil(T / 32)]: bit j % 32 of word j // 32 in row i is set when j is i or an ancestor of i. There may be
    several trees."""

def walk(parents: Int32s, token_ids: Int32s, choices: NDArray[np.int64] | Int32s) -> Int32s:
    """The nodes met from the root, following the first child whose token is the target's choice at the current node.

    token_ids [T-1] belong to nodes 1..T-1, choices [T] to all nodes. Returns a path [m] that begins with 0.
    """

def calibrated_ratios(evidence: Doubles, weight: float, highest: float, root: float = 1.0) -> Doubles:
    """[D]: observed over predicted, the rows of evidence [2, D], shrunk by `weight` pseudo-observations towards the
    ratio of the depth above (`root` at the first), `highest` at most."""

def weigh(
    drafts: Sequence[tuple[Doubles, Int32s, Doubles, int, Doubles, float]], sizes: NDArray[np.int64],
    weight: float, highest: float,
) -> list[Doubles]:  # fmt: skip
    """Of each draft (log_weights [n], depths [n], evidence [2, D], deepest, means [W], share) the acceptance
    probabilities [n] of its nodes: min(1, exp(log_weight) · r_1 · … · r_depth) with the ratios of `calibrated_ratios`,
    0 below `deepest`. Its means of what nodes sizes[w] … sizes[w + 1] − 1 add move by `share` towards the sums of
    these, in place. sizes [W + 1] rise; nodes beyond n add 0."""

def learn(evidence: Doubles, parents: Int32s, log_weights: Doubles, path: Int32s, keep: float) -> None:
    """Take a verified tree and its walked path [m] into evidence [2, D], observed and predicted, in place; the older
    counts `keep` times what it did. At each node of the path its children's mass, given that the node was reached, was
    tried, and the walk went on below all but the last. Depths without children and beyond D learn nothing."""

def best_size(gains: Sequence[Doubles], added_s: Doubles, tokens: float, seconds: float) -> tuple[int, float]:
    """The size 1 … n with most (tokens + Σ gains up to it) / (seconds + added_s of it), and that rate; without gains
    size 0 and tokens / seconds. Gains [n] of several slots are summed; added_s has n entries or more."""

def keep_nucleus(weights: Doubles, share: float) -> None:
    """Zero, in place, all but the smallest set of largest weights [n] whose sum reaches `share` of the whole.

    Weights are finite and not negative. Of equal ones the first stay.
    """

def draw_logits(logits: Floats, temperature: float, seed: int, position: int) -> int:
    """The token that maximises logits [V] + temperature · noise, the lowest of equal ones.

    The noise of tokens 0 … V − 1 is `gumbel` of the seed (0 … 2^64 − 1) and the position. -1 where a logit is NaN or
    +inf, or none is finite. The temperature is positive and finite.
    """

def draw_weights(weights: Doubles, seed: int, position: int, ids: Int32s | None = None) -> int:
    """The index that maximises log(weights [n]) + noise of the tokens `ids` [n], 0 … n − 1 without: a draw in
    proportion to the weights. Of equal ones that of the lowest id; -1 where no weight is positive.

    Weights are finite and not negative.
    """

def noise_bits(seed: int, position: int, token: int) -> int:
    """The 64 bits that a token's noise at a position is made of."""

def gumbel(seed: int, position: int, n: int) -> Doubles:
    """The noise [n] of tokens 0 … n − 1 at a position."""

def attention_workspace_bound(
    sequences: int, tokens: int, q_heads: int, kv_heads: int, head_dim: int, capacity: int
) -> int:
    """Bytes of scratch that tree attention on a GPU needs at most, over every call of 1 to `sequences` sequences and 1
    to `tokens` tokens, behind caches of `capacity` rows. What the TensorRT plugin asks for."""

def compact_cache(
    cache: NDArray[np.uint8], slot: int, head_dim: int, rows: int, half: bool, start: int, keep: Int32s
) -> None:
    """Move row start + keep[j] of the slot to start + j, in place, in every layer of cache [layers, slots, Hkv, bytes].

    keep [m] is strictly increasing and not negative; a row behind the cache's `rows`, a multiple of 64, is refused.
    `half`: the cache is in bfloat16.
    """

def commit_delta(
    states: Floats,
    moves: Floats,
    slot: int,
    rows: Int32s,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
) -> None:
    """Move the slot's states [layers, slots, values] of gated delta nets, in place, along a path: rows [m] of the moves
    [layers, T, values] that the last pass wrote. See `models/delta.py` for what they hold."""

def attention_isa() -> str:
    """The instruction set of the operators on this CPU: "avx512-bf16", "avx512-vnni", "avx512", "avx2" or "plain"."""
