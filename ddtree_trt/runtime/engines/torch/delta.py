"""Gated delta nets over trees in PyTorch: all nodes in one pass without a state per node, and the commit of a path.

A head has a state S [Dk, Dv]; behind its parent p(j) node j has, with a decay a_j and a step b_j of 0 to 1,

    S_j = a_j S_p(j) + b_j k_j (v_j − a_j S_p(j)ᵀ k_j)ᵀ,    o_j = S_jᵀ q_j.

Along a path that is S_j = exp(G_j) S + Σ exp(G_j − G_i) k_i u_iᵀ, over j and its ancestors i: S is the state before the
tree, G_j the sum of log a down to j. The updates u are the solution of a triangular system, since parents come before
their children:

    u_j + b_j Σ exp(G_j − G_i) (k_j · k_i) u_i = b_j (v_j − exp(G_j) Sᵀ k_j),    over its ancestors i alone.

It is solved by substitution: on GPUs our kernel takes a tree's nodes by depth, each with its ancestors alone, and
another commits a path in all layers. A sum of powers of the system's matrix has terms up to C(d, d/2) times the result
where d keys on a path are alike, and the result is their differences.

Letters besides: Hk key heads, each of which serves Hv / Hk value heads that follow each other; C channels of the
convolution, W its taps. A chain is a tree, and a prompt's chunk is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.plugins import DELTA_KEY_DIM, DELTA_TOKENS
from ddtree_trt.runtime.engines.passes import Snapshots

_EPSILON = 1e-6  # added to the square of a norm


@dataclass(frozen=True)
class Kept:
    """What a commit needs of a pass over [N, T] rows, and maybe of layers before: buffers that `tree_pass` fills."""

    keys: Tensor  # float32 [..., T, Hk, Dk], of norm 1
    updates: Tensor  # float32 [..., T, Hv, Dv]: u
    decays: Tensor  # float64 [..., T, Hv]: G
    inputs: Tensor  # [..., T, C]: of the convolution

    def select(self, *index: object) -> Kept:
        return Kept(*(part[index] for part in vars(self).values()))


@dataclass(frozen=True)
class Ancestors:
    """Of the rows of a pass."""

    seen: Tensor  # bool [N, T, T]: whether a row sees another, its ancestors and itself
    parents: Tensor  # int [N, T], −1 for roots and for padding; int32 of trees
    of_tree: bool = False

    @staticmethod
    def of_chains(batch: int, tokens: int, device: torch.device) -> Ancestors:
        """Of rows each of which follows the one before it."""
        column = torch.arange(tokens, device=device)
        return Ancestors((column <= column[:, None]).expand(batch, -1, -1), (column - 1).expand(batch, -1))

    @staticmethod
    def of_trees(mask: Tensor, parents: Tensor) -> Ancestors:
        """Of ancestor-or-self bits int32 [N, T, ⌈T/32⌉] and of parents."""
        column = torch.arange(parents.shape[1], device=mask.device)
        return Ancestors((mask[..., column // 32] >> (column % 32) & 1).bool(), parents, of_tree=True)


class States:
    """What the delta-net layers keep for each slot, and of the rows of the last pass until they are committed."""

    def __init__(
        self, dims: TransformerDims, slots: int, every: int, rows: int, dtype: torch.dtype, device: torch.device, *,
        kernels: bool,
    ) -> None:  # fmt: skip
        """`every`: tokens between `Snapshots`; `rows`: most N·T of a pass; `kernels`: `torch.ops.ddtree` is loaded."""
        assert dims.delta is not None, "only hybrids keep states"
        d, layers = dims.delta, len(dims.delta_layers)
        self._kernels, self._tokens = kernels, DELTA_TOKENS if kernels and d.key_dim <= DELTA_KEY_DIM else 0
        self._number = {layer: n for n, layer in enumerate(dims.delta_layers)}

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, *shape, dtype=dtype, device=device)

        self._states = zeros(slots, d.value_heads, d.key_dim, d.value_dim)
        self._past = zeros(slots, d.taps - 1, d.channels)  # the convolution's last inputs
        self._kept = Kept(
            zeros(rows, d.key_heads, d.key_dim),
            zeros(rows, d.value_heads, d.value_dim),
            zeros(rows, d.value_heads, dtype=torch.float64),
            zeros(rows, d.channels, dtype=dtype),
        )
        self.snapshots = Snapshots[tuple[Tensor, Tensor]](slots, every)

    def of_pass(
        self, layer: int, slots: Tensor, tokens: int, *, of_tree: bool
    ) -> tuple[Tensor, Tensor, Kept, Tensor | None]:
        """Of a layer the states [N, Hv, Dk, Dv] and last inputs [N, W − 1, C] of slots int32 [N], and where [N, T] rows
        of a pass are kept; for our kernel the states of all slots, and `slots`."""
        number, at, batch = self._number[layer], slots.long(), len(slots)
        kept = (part[number, : batch * tokens].unflatten(0, (batch, tokens)) for part in vars(self._kept).values())
        states, past = self._states[number], self._past[number, at]
        if of_tree and tokens <= self._tokens:
            return states, past, Kept(*kept), slots
        return states[at], past, Kept(*kept), None

    def commit(self, slot: int, rows: slice | Tensor, length: int, size: int, *, prompt_ends: bool) -> None:
        """Advance a slot of that length by `size` rows of the last pass, of all N·T, which are a path from a root."""
        path = self._kept.select(slice(None), rows)
        before = self._states[:, slot], self._past[:, slot]
        for stop in self.snapshots.stops(slot, length, length + size, prompt_ends=prompt_ends):
            part = path.select(slice(None), slice(stop - length))
            # Before the last token of a prompt whose chunk has no other there is nothing to advance by.
            kept = advanced(*before, part) if stop > length else (before[0].clone(), before[1].clone())
            self.snapshots.keep(slot, stop, kept)
        if self._kernels:
            at, first = (None, rows.start) if isinstance(rows, slice) else (rows, 0)
            torch.ops.ddtree.delta_commit(self._states, self._past, *vars(self._kept).values(), at, first, size, slot)
            return
        for tensor, values in zip(before, advanced(*before, path), strict=True):
            tensor.copy_(values)

    def restore(self, slot: int, length: int) -> None:
        """Go back to a kept state, or to 0, and forget later ones."""
        state, past = self.snapshots.back_to(slot, length) or (0, 0)
        self._states[:, slot], self._past[:, slot] = state, past


def delta_net(
    projected: Tensor, net: DeltaNet, weights: Sequence[Tensor], eps: float, ancestors: Ancestors,
    state: Tensor, past: Tensor, kept: Kept, slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The layer from projection to projection: float32 [N, T, Hv·Dv] of rows [N, T, sum of `projected_widths`], behind
    a state [N, Hv, Dk, Dv] and inputs [N, W − 1, C] of the convolution. With `slots` int32 [N] the states are those of
    all slots, for our kernel. `weights`: convolution [C, W], decays [Hv], their biases [Hv], norm [Dv], all float32."""
    conv, decay, bias, norm = weights
    inputs, gates, steps, decays = projected.split(net.projected_widths, -1)
    kept.inputs.copy_(inputs)
    mixed = convolve(inputs, past, ancestors.parents, conv)
    moves = decay * F.softplus(decays.float() + bias), steps.float().sigmoid()
    if slots is None:
        sizes = net.key_dim, net.key_dim, net.value_dim
        parts = zip(mixed.split(net.widths, -1), sizes, strict=True)
        read = tree_pass([part.unflatten(-1, (-1, size)) for part, size in parts], *moves, state, ancestors.seen, kept)
    else:
        read = torch.empty_like(kept.updates)
        results = kept.keys, kept.updates, kept.decays
        torch.ops.ddtree.delta_tree(mixed, *moves, ancestors.parents, state, slots, read, *results)
    return F.rms_norm(read, (net.value_dim,), norm, eps).flatten(2) * F.silu(gates.float())


def convolve(inputs: Tensor, past: Tensor, parents: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution with SiLU, float32 [N, T, C], of inputs [N, T, C] whose rows have parents int [N, T], −1
    for roots. `past` [N, W − 1, C] are the inputs before the tree, `weight` float32 [C, W]: of a node's own input the
    last column."""
    batch, before = past.shape[:2]
    rows = torch.cat((past, inputs.float()), 1)
    earlier = torch.arange(-1, before - 1, device=parents.device).clamp(min=0).expand(batch, -1)
    parent = torch.cat((earlier, parents.long() + before), 1)  # of each of `rows`, as far as a node asks for it
    total, at = inputs * weight[:, -1], parent[:, before:]
    for column in range(before - 1, -1, -1):
        total = torch.addcmul(total, rows.gather(1, at[..., None].expand(inputs.shape)), weight[:, column])
        at = parent.gather(1, at)
    return F.silu(total)


def tree_pass(
    qkv: Sequence[Tensor], log_decays: Tensor, steps: Tensor, state: Tensor, seen: Tensor, kept: Kept
) -> Tensor:
    """The results [N, T, Hv, Dv] of rows q and k [N, T, Hk, Dk] and v [N, T, Hv, Dv], with log_decays and steps
    [N, T, Hv], behind a state [N, Hv, Dk, Dv], all float32. `seen` as in `Ancestors`; parents come before their
    children. Queries and keys are divided by their norms here."""
    *unscaled, v = qkv
    groups = v.shape[2] // unscaled[0].shape[2]
    q, k = (x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt() for x in unscaled)
    kept.keys.copy_(k)
    # float64: of two sums over a path that decays fast only their small difference counts.
    sums = seen.double() @ log_decays.double()  # [N, T, Hv]
    kept.decays.copy_(sums)
    sums = sums.transpose(1, 2)
    between = (sums[..., :, None] - sums[..., None, :]).float()  # [N, Hv, T, T]
    between = between.masked_fill(~seen[:, None], float("-inf")).exp()
    since = sums.float().exp()[..., None]  # [N, Hv, T, 1]
    both = torch.cat((k, q * q.shape[-1] ** -0.5), 1).transpose(1, 2)  # [N, Hk, 2·T, Dk]
    products = both @ both[:, :, : k.shape[1]].transpose(2, 3)
    of_state = both.repeat_interleave(groups, 1) @ state  # [N, Hv, 2·T, Dv]
    keys, queries = (x.repeat_interleave(groups, 1) * between for x in products.chunk(2, 2))
    from_keys, from_queries = of_state.chunk(2, 2)
    steps = steps.transpose(1, 2)[..., None]
    wanted = steps * (v.transpose(1, 2) - since * from_keys)
    updates = torch.linalg.solve_triangular(steps * keys, wanted, upper=False, unitriangular=True)
    kept.updates.copy_(updates.transpose(1, 2))
    return (since * from_queries + queries @ updates).transpose(1, 2)


def advanced(state: Tensor, past: Tensor, path: Kept) -> tuple[Tensor, Tensor]:
    """States [..., Hv, Dk, Dv] and last inputs [..., W − 1, C] of the convolution behind the rows of a path."""
    groups = path.updates.shape[-2] // path.keys.shape[-2]
    last = path.decays[..., -1:, :]
    weights = (last - path.decays).exp().float()  # [..., m, Hv]
    keys = path.keys.repeat_interleave(groups, -2) * weights[..., None]
    added = keys.movedim(-3, -1) @ path.updates.movedim(-3, -2)  # [..., Hv, Dk, m] by [..., Hv, m, Dv]
    new = torch.addcmul(added, state, last[..., 0, :, None, None].exp().float())
    return new, torch.cat((past, path.inputs.float()), -2)[..., -past.shape[-2] :, :].clone()
