"""The operators of a round on the device: the kernels of `torch.ops.ddtree`, or on a CPU the host's C++ functions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree_trt import _native
from ddtree_trt.runtime.engines.padding import write_mask
from ddtree_trt.runtime.engines.torch.attention import load_operators
from ddtree_trt.runtime.tree import build_tree


def round_ops(device: torch.device, kernels: bool) -> HostOps:
    """The kernels on a GPU, or on a CPU where they are emulated (`kernels`); else the host's operators. Raises
    MissingDependency as `load_operators` does."""
    if device.type == "cuda":
        load_operators()  # attention without kernels has not loaded them
    return KernelOps() if device.type == "cuda" or kernels else HostOps()


class HostOps:
    """The operators of `cpp_plugins/torch/ops.cpp` that a round needs, with their arguments: the host's C++ functions,
    for tensors of a CPU."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        """Trees of log_probs [N, L, K] into the int32 tensors [N, T], and their sizes, root included, into counts."""
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
        """Ancestor-or-self bits of parents [N, T] into mask [N, T, W]."""
        mask.zero_()
        for row, bits in zip(parents.numpy(), mask.numpy(), strict=True):
            write_mask(bits.view(np.uint32), row[: _tree_size(row)])

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        """The accepted paths into path [N, T], padded with −1; their lengths, next bonus tokens and the next committed
        lengths into tensors [N]."""
        path.fill_(-1)
        for n, size in enumerate(counts.tolist()):
            tree, chosen = parents[n, :size].numpy(), choices[n, :size].numpy()
            nodes = _native.walk(tree, token_ids[n, 1:size].numpy(), chosen)
            path[n, : len(nodes)] = torch.from_numpy(nodes)
            lengths[n], next_tokens[n] = len(nodes), int(chosen[nodes[-1]])
        next_past.copy_(past + lengths)


class KernelOps(HostOps):
    """`torch.ops.ddtree`."""

    def build_tree(self, *tensors: Tensor) -> None:
        *given, counts = tensors
        torch.ops.ddtree.build_tree(*given, None, counts)  # without log-weights

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        torch.ops.ddtree.packed_mask(parents, mask)

    def walk(self, *tensors: Tensor) -> None:
        torch.ops.ddtree.walk(*tensors)


def _tree_size(parents: NDArray[np.int32]) -> int:
    """Number of nodes, root included, of a tree whose padding rows have the parent −1, as the root."""
    return 1 + int(np.count_nonzero(parents[1:] >= 0))
