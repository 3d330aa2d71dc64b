"""A gated delta net as its recurrence says, node by node in float64: the truth of every form of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.models.delta import DeltaNet

Array = NDArray[Any]


@dataclass(frozen=True)
class Weights:
    conv: Array  # [taps, C]
    decay: Array  # [Hv], negative
    step_bias: Array  # [Hv]
    head_norm: Array  # [Dv]
    eps: float = 1e-6


def random_net(rng: np.random.Generator, *, share: int = 2, key_dim: int = 32, value_dim: int = 48) -> DeltaNet:
    return DeltaNet(2, 2 * share, key_dim, value_dim, int(rng.integers(2, 6)), (1,))


def random_weights(rng: np.random.Generator, d: DeltaNet) -> Weights:
    """Decays from almost none to almost all."""
    single, draw = np.float32, rng.standard_normal
    return Weights(
        draw((d.taps, d.channels)).astype(single),
        -np.exp(rng.uniform(-5, 1, d.value_heads)).astype(single),
        draw(d.value_heads).astype(single),
        (1 + 0.1 * draw(d.value_dim)).astype(single),
    )


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def unit(x: Array) -> Array:
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)


@dataclass
class State:
    """A slot's state of one layer."""

    heads: Array  # [Hv, Dk, Dv]
    inputs: Array  # [taps − 1, C], the oldest first

    @staticmethod
    def empty(d: DeltaNet) -> State:
        return State(np.zeros((d.value_heads, d.key_dim, d.value_dim)), np.zeros((d.taps - 1, d.channels)))

    def flat(self) -> Array:
        """As engines store it, float32."""
        return np.concatenate([self.heads.ravel(), self.inputs.ravel()]).astype(np.float32)


def step(d: DeltaNet, w: Weights, row: Array, past: State) -> tuple[Array, State]:
    """What a row of projections gives [Hv · Dv], and the state behind it."""
    mixed, z, steps, rates = np.split(row.astype(np.float64), np.cumsum(d.projected_widths[:-1]))
    inputs = np.concatenate([past.inputs, mixed[None]])
    q, k, v = np.split(silu((inputs * w.conv).sum(0)), np.cumsum(d.widths[:-1]))
    share = d.value_heads // d.key_heads
    q, k = (np.repeat(unit(x.reshape(d.key_heads, d.key_dim)), share, 0) for x in (q, k))
    a = np.exp(w.decay * np.log1p(np.exp(rates + w.step_bias)))
    b = 1 / (1 + np.exp(-steps))
    heads = past.heads * a[:, None, None]
    change = b[:, None] * (v.reshape(d.value_heads, -1) - np.einsum("hkv,hk->hv", heads, k))
    heads = heads + k[:, :, None] * change[:, None]
    seen = np.einsum("hkv,hk->hv", heads, q) * d.key_dim**-0.5
    normed = seen / np.sqrt(np.square(seen).mean(-1, keepdims=True) + w.eps) * w.head_norm
    return normed.ravel() * silu(z), State(heads, inputs[1:])


def walk(d: DeltaNet, w: Weights, rows: Array, parents: Sequence[int], past: State) -> tuple[Array, list[State]]:
    """Results [T, Hv · Dv] of a tree's rows, and the state behind each."""
    found, states = [], list[State]()
    for row, parent in zip(rows, parents, strict=True):
        out, state = step(d, w, row, past if parent < 0 else states[parent])
        found.append(out)
        states.append(state)
    return np.stack(found), states


def random_parents(rng: np.random.Generator, nodes: int, depth: int = 16) -> list[int]:
    """Of a tree of no more than that depth, each node below any earlier one."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        parent = int(rng.integers(len(parents)))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
