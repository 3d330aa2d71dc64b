"""The operators of a round on the device: the kernels of `torch.ops.ddtree`, or the same on the host for a CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ddtree_trt.plugins import reference
from ddtree_trt.runtime.tree import build_tree


class RoundOps(Protocol):
    """The operators of `cpp_plugins/torch/ops.cpp` that a round needs, with their arguments."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        """Trees of log_probs [N, L, K] into the int32 tensors [N, T], and their sizes, root included, into counts."""

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        """Ancestor-or-self bits of parents [N, T] into mask [N, T, W]."""

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        """The accepted paths into path [N, T], padded with −1, and what follows from them into tensors [N]."""


class KernelOps:
    """`torch.ops.ddtree`."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        torch.ops.ddtree.build_tree(
            log_probs, candidates, root_tokens, budgets, past, token_ids, parents, depths, positions, None, counts
        )

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        torch.ops.ddtree.packed_mask(parents, mask)

    def walk(self, *tensors: Tensor) -> None:
        torch.ops.ddtree.walk(*tensors)


class HostOps:
    """The same in NumPy and the host's C++, for a CPU."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        for n, budget in enumerate(budgets.tolist()):
            tree = build_tree(log_probs[n].numpy(), candidates[n].numpy(), budget)
            size = 1 + len(tree)
            token_ids[n], parents[n], depths[n] = root_tokens[n], -1, 0
            token_ids[n, 1:size] = torch.from_numpy(tree.token_ids)
            parents[n, :size] = torch.from_numpy(tree.parents)
            depths[n, 1:size] = torch.from_numpy(tree.depths)
            counts[n] = size
        positions.copy_(past[:, None] + depths)

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        for n, row in enumerate(parents.numpy()):
            mask[n] = torch.from_numpy(reference.packed_mask(row, mask.shape[2]))

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        for n, count in enumerate(counts.tolist()):
            nodes = reference.walk(parents[n].numpy(), token_ids[n].numpy(), choices[n].numpy(), count)
            path[n] = -1
            path[n, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
            lengths[n], next_tokens[n] = len(nodes), choices[n, nodes[-1]]
        next_past.copy_(past + lengths)
