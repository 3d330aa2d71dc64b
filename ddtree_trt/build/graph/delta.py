"""A gated delta net over trees by matrix products alone, for runtimes without an operator of ours: no row waits for
another, so a pass over a tree takes as many nodes as one over a token.

With G the sum of g along a row's path and D_ji = exp(G_j − G_i) where i is j or its ancestor, else 0, the rows' changes
of the state are U = (I + A)⁻¹ R with A_ji = b_j D_ji k_j·k_i below the diagonal and R_j = b_j (v_j − exp(G_j) Sᵀk_j);
row j reads exp(G_j) Sᵀq_j + Σ_i D_ji (q_j·k_i) u_i, and a slot whose path ends at row j goes on from
exp(G_j) S + Σ_i D_ji k_i u_iᵀ, which `advance` computes in a graph of its own. Sums G are no products: TensorRT may
round what it multiplies to TF32.

I + A is triangular, since parents are before their children. Its inverse X is made of those of its diagonal blocks,
each time twice as large: X ← X − X·(A within a pair of blocks)·X, ⌈log₂ T⌉ times. A sum of powers of A takes as many
products, but where rows are alike its terms are far larger than the sum: 10^17 in a chain of 64 equal keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_trt.build.graph.ops import Delta, Graph
from ddtree_trt.models.delta import DeltaNet

_NEVER = -1e9  # what is not seen: exp of it is 0


@dataclass(frozen=True)
class Tree:
    sources: str  # int64 [N, T, taps]: rows of the last taps − 1 inputs and the call's that a row's convolution takes
    seen: str  # bool [N, T, T]: whether the column is the row or its ancestor
    most: int  # T is not more


def delta_net(g: Graph, projected: str, at: Delta, tree: Tree, past: tuple[str, str], out: str, kept: str) -> str:
    """The gated delta net over rows whose projections are [N, T, sum of `projected_widths`], behind `past`: the states
    float32 [N, Hv, Dk, Dv] and the convolution's last inputs [N, taps − 1, C]. Returns `out` [N, T, Hv · Dv] in the
    graph's `floats`, and adds `kept`, float32 [N, T, sum of `kept_widths`]: what `advance` needs of the pass."""
    d, (state, inputs) = at.net, past

    def op(kind: str, inputs: list[str], name: str, **attrs: Any) -> str:
        return g.op(kind, inputs, [f"{out}.{name}"], **attrs)

    def silu(x: str, name: str) -> str:
        return op("Mul", [x, op("Sigmoid", [x], f"{name}.sigmoid")], name)

    def by_head(x: str, heads: int, size: int, name: str) -> str:
        """x [N, T, heads · size] as [N, heads, T, size]."""
        return op("Transpose", [g.reshape(x, [0, 0, heads, size], f"{out}.{name}.rows")], name, perm=[0, 2, 1, 3])

    def unit(x: str, name: str) -> str:
        """Queries or keys of norm 1, once for every value head that they serve."""
        heads = by_head(x, d.key_heads, d.key_dim, f"{name}.heads")
        squares = op("Mul", [heads, heads], f"{name}.squares")
        total = op("ReduceSum", [squares, g.number([-1])], f"{name}.sum", keepdims=1)
        norm = op("Sqrt", [op("Add", [total, g.number(1e-6)], f"{name}.shifted")], f"{name}.norm")
        normed = op("Unsqueeze", [op("Div", [heads, norm], f"{name}.unit"), g.number([2])], f"{name}.single")
        share = d.value_heads // d.key_heads
        each = op("Expand", [normed, g.number([1, 1, share, 1, 1])], f"{name}.each")
        return g.reshape(each, [0, d.value_heads, -1, d.key_dim], f"{out}.{name}")

    single = projected if g.floats == "float32" else g.cast(projected, "float32", f"{out}.single")
    parts = [f"{out}.{name}" for name in ("mixed", "z", "steps", "rates")]
    mixed, z, steps, rates = g.split(single, d.projected_widths, parts)

    inputs = g.concat([inputs, mixed], f"{out}.inputs", axis=1)
    rows = op("GatherND", [inputs, op("Unsqueeze", [tree.sources, g.number([3])], "sources")], "taps", batch_dims=1)
    summed = op("ReduceSum", [op("Mul", [rows, at.conv], "weighed"), g.number([2])], "conv", keepdims=0)
    names = [f"{out}.{name}" for name in ("q.flat", "k.flat", "v.flat")]
    query, key, value = g.split(silu(summed, "activated"), d.widths, names)
    query = op("Mul", [unit(query, "q.unit"), g.number(d.key_dim**-0.5)], "q")
    key, value = unit(key, "k"), by_head(value, d.value_heads, d.value_dim, "v")

    step = by_head(op("Sigmoid", [steps], "step.flat"), d.value_heads, 1, "step")
    rate = op("Softplus", [op("Add", [rates, at.step_bias], "rates.shifted")], "rates.positive")
    own = by_head(op("Mul", [rate, at.decay], "g"), d.value_heads, 1, "g.heads")
    seen = op("Unsqueeze", [tree.seen, g.number([1])], "seen")
    across = op("Transpose", [own], "g.columns", perm=[0, 1, 3, 2])
    total = op("ReduceSum", [op("Where", [seen, across, g.number(0.0)], "g.path"), g.number([-1])], "G", keepdims=1)
    decays = op("Exp", [total], "decays")
    across = op("Sub", [total, op("Transpose", [total], "G.columns", perm=[0, 1, 3, 2])], "G.differences")
    shares = op("Exp", [op("Where", [seen, across, g.number(_NEVER)], "G.seen")], "shares")

    columns = op("Transpose", [key], "k.columns", perm=[0, 1, 3, 2])
    alike = op("Mul", [op("MatMul", [key, columns], "k.k"), shares], "k.shared")
    changes = op("Mul", [op("MatMul", [key, state], "k.state"), decays], "k.read")
    changes = op("Mul", [op("Sub", [value, changes], "news"), step], "R")
    inverse = _inverse(g, op("Mul", [alike, step], "A"), tree, out)
    changes = op("MatMul", [inverse, changes], "U") if inverse else changes
    own = op("Mul", [op("MatMul", [query, columns], "q.k"), shares], "q.shared")
    read = op("Mul", [op("MatMul", [query, state], "q.state"), decays], "q.read")
    seen_heads = op("Add", [read, op("MatMul", [own, changes], "q.changes")], "heads")

    rows = op("Transpose", [seen_heads], "heads.rows", perm=[0, 2, 1, 3])
    mean = op("ReduceMean", [op("Mul", [rows, rows], "heads.squares"), g.number([-1])], "heads.mean", keepdims=1)
    root = op("Sqrt", [op("Add", [mean, g.number(at.eps)], "heads.shifted")], "heads.root")
    normed = op("Mul", [op("Div", [rows, root], "heads.unit"), at.head_norm], "heads.normed")
    flat = g.reshape(normed, [0, 0, d.widths[2]], f"{out}.flat")
    gated = op("Mul", [flat, silu(z, "z.silu")], "gated")
    g.op("Identity", [gated], [out]) if g.floats == "float32" else g.cast(gated, g.floats, out)
    parts = []
    for x, width in zip((f"{out}.k.unit", changes, total), kept_widths(d), strict=False):
        by_row = g.op("Transpose", [x], [f"{x}.by_row"], perm=[0, 2, 1, 3])
        parts.append(g.reshape(by_row, [0, 0, width], f"{x}.flat"))
    g.concat([*parts, mixed], kept, axis=-1)
    return out


def _inverse(g: Graph, a: str, tree: Tree, out: str) -> str:
    """(I + A)⁻¹ of what A [N, H, T, T] has below its diagonal; "" where T is 1 at most."""
    inverse = ""
    for step in range(1, (tree.most - 1).bit_length() + 1):
        between = g.op("Where", [_pairs(g, tree, step), a, g.number(0.0)], [f"{out}.between.{step}"])
        if inverse:
            left = g.op("MatMul", [inverse, between], [f"{out}.left.{step}"])
            between = g.op("MatMul", [left, inverse], [f"{out}.change.{step}"])
        start = inverse or g.cast(_pairs(g, tree, 0), "float32", "blocks.ones")
        inverse = g.op("Sub", [start, between], [f"{out}.inverse.{step}"])
    return inverse


def _pairs(g: Graph, tree: Tree, step: int) -> str:
    """bool [T, T]: where a row and an earlier column are in different halves of one block of 2^step; at step 0 the
    diagonal."""
    row, column = np.ogrid[: tree.most, : tree.most]
    apart = np.where(column <= row, np.frexp(row ^ column)[1], -1).astype(np.int32)
    size = g.op("Shape", [tree.seen], ["blocks.size"], start=1, end=3)
    every = g.constant(f"blocks.{tree.most}", apart)
    within = g.op("Slice", [every, g.number([0, 0]), size, g.number([0, 1])], ["blocks"])
    return g.op("Equal", [within, g.number(step, np.int32)], [f"blocks.pairs.{step}"])


def kept_widths(net: DeltaNet) -> tuple[int, int, int, int]:
    """Widths of what a commit needs of a row, side by side: keys [Hk·Dk], changes [Hv·Dv], sums of g [Hv] and inputs of
    the convolution [C]."""
    _, keys, values = net.widths
    return keys, values, net.value_heads, net.channels


def advance(
    g: Graph, past: tuple[str, str], kept: str, rows: tuple[str, str], net: DeltaNet, results: tuple[str, str]
) -> None:
    """Advance one slot along a part of a path, from `past`, its state [1, Hv, Dk, Dv] and last inputs [1, 1, taps − 1,
    C], into `results`, updates of the same tensors. `kept` [F, sum of `kept_widths`] are the last pass's rows. `rows`:
    int32 [K], the rows taken, rising, and then −1; and int32 [1], the path's row before them, −1 for none."""
    (state, inputs), (taken, before), out = past, rows, results[0]
    groups = net.value_heads // net.key_heads

    def op(kind: str, *given: str, name: str, **attrs: Any) -> str:
        return g.op(kind, given, [f"{out}.{name}"], **attrs)

    def parts(numbers: str, name: str) -> Sequence[str]:
        found = op("Gather", kept, numbers, name=f"{name}.rows", axis=0)
        return g.split(found, kept_widths(net), [f"{out}.{name}.{part}" for part in ("k", "u", "g", "x")])

    none, first = g.number(0, np.int32), g.number([0])
    valid = g.op("Less", [g.number(-1, np.int32), taken], ["taken.valid"])
    existing = g.op("Max", [taken, none], ["taken.rows"])
    last = g.op("ReduceMax", [existing, first], ["taken.last"], keepdims=1)
    behind = g.op("Less", [g.number(-1, np.int32), before], ["before.valid"])
    keys, changes, sums, new_inputs = parts(existing, "path")
    _, _, end, _ = parts(last, "last")  # [1, Hv]
    _, _, start, _ = parts(g.op("Max", [before, none], ["before.row"]), "before")
    start = op("Where", behind, start, g.number(0.0), name="start")
    tall = g.op("Unsqueeze", [valid, g.number([1])], ["taken.tall"])
    between = op("Where", tall, op("Sub", end, sums, name="between"), g.number(_NEVER), name="shown")
    shares = g.reshape(op("Exp", between, name="shares"), [-1, net.key_heads, groups, 1], f"{out}.shares.heads")
    weighed = op("Mul", g.reshape(keys, [-1, net.key_heads, 1, net.key_dim], f"{out}.keys"), shares, name="weighed")
    columns = op("Transpose", weighed, name="columns", perm=[1, 2, 3, 0])  # [Hk, Hv / Hk, Dk, K]
    columns = g.reshape(columns, [1, net.value_heads, net.key_dim, -1], f"{out}.columns.heads")
    by_row = g.reshape(changes, [1, -1, net.value_heads, net.value_dim], f"{out}.changes")
    added = op("MatMul", columns, op("Transpose", by_row, name="changes.heads", perm=[0, 2, 1, 3]), name="added")
    decay = op("Exp", op("Sub", end, start, name="since"), name="decay")
    decayed = op("Mul", state, g.reshape(decay, [1, net.value_heads, 1, 1], f"{out}.decay.heads"), name="decayed")
    g.op("TensorScatter", [state, op("Add", decayed, added, name="new"), first], [out], axis=2)

    every = g.concat([g.reshape(inputs, [-1, net.channels], f"{out}.earlier"), new_inputs], f"{out}.inputs", axis=0)
    count = g.op("ReduceSum", [g.cast(valid, "int32", "taken.ones"), first], ["taken.count"], keepdims=1)
    places = g.op("Add", [count, g.number(range(net.taps - 1), np.int32)], ["taken.tail"])
    tail = op("Gather", every, places, name="tail", axis=0)
    tail = g.reshape(tail, [1, 1, -1, net.channels], f"{out}.tail.slot")
    g.op("TensorScatter", [inputs, tail, first], [results[1]], axis=2)
