"""A gated delta net over trees by matrix products alone, for runtimes without an operator of ours: no row waits for
another, so a pass over a tree takes as many nodes as one over a token.

With G the sum of g along a row's path and D_ji = exp(G_j − G_i) where i is j or its ancestor, else 0, the rows' changes
of the state are U = (I + A)⁻¹ R with A_ji = b_j D_ji k_j·k_i below the diagonal and R_j = b_j (v_j − exp(G_j) Sᵀk_j);
row j reads exp(G_j) Sᵀq_j + Σ_i D_ji (q_j·k_i) u_i, and a slot whose path ends at row j goes on from
exp(G_j) S + Σ_i D_ji k_i u_iᵀ.

I + A is triangular, since parents are before their children. Its inverse X is made of those of its diagonal blocks,
each time twice as large: X ← X − X·(A within a pair of blocks)·X, ⌈log₂ T⌉ times. A sum of powers of A takes as many
products, but where rows are alike its terms are far larger than the sum: 10^17 in a chain of 64 equal keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_trt.build.graph.ops import Delta, Graph

_NEVER = np.float32(-1e9)  # what is not seen: exp of it is 0


@dataclass(frozen=True)
class Tree:
    """What a graph knows of its call's trees."""

    sources: str  # int64 [N, T, taps]: rows of the last taps − 1 inputs and the call's that a row's convolution takes
    paths: str  # float32 [N, T, T]: 1 where the column is the row or its ancestor, else 0
    most: int  # T is not more


@dataclass(frozen=True)
class Pass:
    """A pass and what a commit needs of it; H is Hv."""

    out: str  # [N, T, Hv · Dv] in the graph's `floats`
    inputs: str  # float32 [N, taps − 1 + T, C]: of the convolution
    keys: str  # float32 [N, H, T, Dk]
    changes: str  # float32 [N, H, T, Dv]: U
    shares: str  # float32 [N, H, T, T]: D
    decays: str  # float32 [N, H, T, 1]: exp(G)


def delta_net(g: Graph, projected: str, at: Delta, tree: Tree, past: tuple[str, str], out: str) -> Pass:
    """The gated delta net over rows whose projections are [N, T, sum of `projected_widths`], behind `past`: the states
    float32 [N, Hv, Dk, Dv] and the convolution's last inputs [N, taps − 1, C]."""
    d, (state, inputs) = at.net, past

    def op(kind: str, inputs: list[str], name: str, **attrs: Any) -> str:
        return g.op(kind, inputs, [f"{out}.{name}"], **attrs)

    def number(value: float) -> str:
        return g.constant(f"number.{value:g}", np.array(value, np.float32))

    def axes(*values: int) -> str:
        return g.constant("axes." + ".".join(map(str, values)), np.array(values, np.int64))

    def silu(x: str, name: str) -> str:
        return op("Mul", [x, op("Sigmoid", [x], f"{name}.sigmoid")], name)

    def by_head(x: str, heads: int, size: int, name: str) -> str:
        """x [N, T, heads · size] as [N, heads, T, size]."""
        return op("Transpose", [g.reshape(x, [0, 0, heads, size], f"{out}.{name}.rows")], name, perm=[0, 2, 1, 3])

    def unit(x: str, name: str) -> str:
        """Queries or keys of norm 1, once for every value head that they serve."""
        heads = by_head(x, d.key_heads, d.key_dim, f"{name}.heads")
        squares = op("ReduceSum", [op("Mul", [heads, heads], f"{name}.squares"), axes(-1)], f"{name}.sum", keepdims=1)
        norm = op("Sqrt", [op("Add", [squares, number(1e-6)], f"{name}.shifted")], f"{name}.norm")
        normed = op("Unsqueeze", [op("Div", [heads, norm], f"{name}.unit"), axes(2)], f"{name}.single")
        share = d.value_heads // d.key_heads
        times = g.constant(f"times.{share}", np.array([1, 1, share, 1, 1], np.int64))
        return g.reshape(
            op("Expand", [normed, times], f"{name}.each"), [0, d.value_heads, -1, d.key_dim], f"{out}.{name}"
        )

    single = projected if g.floats == "float32" else g.cast(projected, "float32", f"{out}.single")
    parts = [f"{out}.{name}" for name in ("mixed", "z", "steps", "rates")]
    mixed, z, steps, rates = g.split(single, d.projected_widths, parts)

    inputs = g.concat([inputs, mixed], f"{out}.inputs", axis=1)
    rows = op("GatherND", [inputs, op("Unsqueeze", [tree.sources, axes(3)], "sources")], "taps", batch_dims=1)
    summed = op("ReduceSum", [op("Mul", [rows, at.conv], "weighed"), axes(2)], "conv", keepdims=0)
    names = [f"{out}.{name}" for name in ("q.flat", "k.flat", "v.flat")]
    query, key, value = g.split(silu(summed, "activated"), d.widths, names)
    query = op("Mul", [unit(query, "q.unit"), number(d.key_dim**-0.5)], "q")
    key, value = unit(key, "k"), by_head(value, d.value_heads, d.value_dim, "v")

    step = by_head(op("Sigmoid", [steps], "step.flat"), d.value_heads, 1, "step")
    rate = op("Softplus", [op("Add", [rates, at.step_bias], "rates.shifted")], "rates.positive")
    decayed = op("MatMul", [tree.paths, op("Mul", [rate, at.decay], "g")], "G.flat")
    total = by_head(decayed, d.value_heads, 1, "G")
    decays = op("Exp", [total], "decays")
    across = op("Sub", [total, op("Transpose", [total], "G.columns", perm=[0, 1, 3, 2])], "G.differences")
    half, never = number(0.5), number(float(_NEVER))
    seen = op("Greater", [op("Unsqueeze", [tree.paths, axes(1)], "paths"), half], "seen")
    shares = op("Exp", [op("Where", [seen, across, never], "G.seen")], "shares")

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
    mean = op("ReduceMean", [op("Mul", [rows, rows], "heads.squares"), axes(-1)], "heads.mean", keepdims=1)
    root = op("Sqrt", [op("Add", [mean, number(at.eps)], "heads.shifted")], "heads.root")
    normed = op("Mul", [op("Div", [rows, root], "heads.unit"), at.head_norm], "heads.normed")
    flat = g.reshape(normed, [0, 0, d.widths[2]], f"{out}.flat")
    gated = op("Mul", [flat, silu(z, "z.silu")], "gated")
    g.op("Identity", [gated], [out]) if g.floats == "float32" else g.cast(gated, g.floats, out)
    return Pass(out, inputs, key, changes, shares, decays)


def _inverse(g: Graph, a: str, tree: Tree, out: str) -> str:
    """(I + A)⁻¹ of what A [N, H, T, T] has below its diagonal; "" where T is 1 at most."""
    inverse = ""
    for step in range(1, (tree.most - 1).bit_length() + 1):
        between = g.op("Where", [_pairs(g, tree, step), a, _zero(g)], [f"{out}.between.{step}"])
        if inverse:
            left = g.op("MatMul", [inverse, between], [f"{out}.left.{step}"])
            between = g.op("MatMul", [left, inverse], [f"{out}.change.{step}"])
        start = inverse or g.cast(_pairs(g, tree, 0), "float32", "blocks.ones")
        inverse = g.op("Sub", [start, between], [f"{out}.inverse.{step}"])
    return inverse


def _zero(g: Graph) -> str:
    return g.constant("number.0", np.array(0, np.float32))


def _pairs(g: Graph, tree: Tree, step: int) -> str:
    """bool [T, T]: where a row and an earlier column are in different halves of one block of 2^step; at step 0 the
    diagonal."""
    row, column = np.ogrid[: tree.most, : tree.most]
    apart = np.where(column <= row, np.frexp(row ^ column)[1], -1).astype(np.int32)
    size = g.op("Shape", [tree.paths], ["blocks.size"], start=1, end=3)
    start, one, axes = (g.constant(f"pair.{v}.{w}", np.array([v, w], np.int64)) for v, w in ((0, 0), (1, 1), (0, 1)))
    within = g.op("Slice", [g.constant(f"blocks.{tree.most}", apart), start, size, axes, one], ["blocks"])
    return g.op("Equal", [within, g.constant(f"block.{step}", np.array(step, np.int32))], [f"blocks.pairs.{step}"])


def committed(g: Graph, done: Pass, past_state: str, path: tuple[str, str], out: str) -> tuple[str, str]:
    """(states, the convolution's last inputs) of slots whose paths end at rows `path[0]` int64 [N]; `path[1]` int64
    [N, taps − 1] are the rows of `inputs` that the next row's convolution takes besides its own."""
    last, sources = path

    def op(kind: str, inputs: list[str], name: str, **attrs: Any) -> str:
        return g.op(kind, inputs, [f"{out}.{name}"], **attrs)

    def axes(*values: int) -> str:
        return g.constant("axes." + ".".join(map(str, values)), np.array(values, np.int64))

    def at_last(x: str, name: str) -> str:
        """Row `last` of x [N, H, T, any] as [N, H, any, 1]."""
        rows = op("Transpose", [x], f"{name}.rows", perm=[0, 2, 1, 3])
        index = op("Unsqueeze", [last, axes(1)], f"{name}.index")
        row = op("GatherND", [rows, index], f"{name}.row", batch_dims=1)  # [N, H, any]
        return op("Unsqueeze", [row, axes(3)], name)

    weighed = op("Mul", [done.keys, at_last(done.shares, "shares")], "weighed")
    moved = op("MatMul", [op("Transpose", [weighed], "columns", perm=[0, 1, 3, 2]), done.changes], "moved")
    state = op("Add", [op("Mul", [past_state, at_last(done.decays, "decays")], "decayed"), moved], "state")
    index = op("Unsqueeze", [sources, axes(2)], "sources")
    return state, op("GatherND", [done.inputs, index], "inputs", batch_dims=1)
