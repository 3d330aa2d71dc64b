"""Gated delta nets of the PyTorch engine as functions, against the recurrence node by node in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from delta_truth import Array, State, Weights, path_to, random_net, random_parents, random_weights, walk
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.runtime.engines.passes import mask_words, write_mask
from ddtree_trt.runtime.engines.torch.delta import Ancestors, Kept, advanced, delta_net


def ancestors_of(trees: list[list[int]]) -> Ancestors:
    rows = len(trees[0])
    masks = np.zeros((len(trees), rows, mask_words(rows)), np.uint32)
    parents = np.array(trees, np.int32)
    for mask, tree in zip(masks, parents, strict=True):
        write_mask(mask, tree)
    return Ancestors.of_trees(torch.from_numpy(masks.view(np.int32)), torch.from_numpy(parents))


def kept_for(d: DeltaNet, batch: int, rows: int) -> Kept:
    keys, values = (torch.empty(batch, rows, *e) for e in ((d.key_heads, d.key_dim), (d.value_heads, d.value_dim)))
    decays = torch.empty(batch, rows, d.value_heads, dtype=torch.float64)
    return Kept(keys, values, decays, torch.empty(batch, rows, d.channels))


def passed(d: DeltaNet, w: Weights, rows: Array, past: list[State], ancestors: Ancestors) -> tuple[Tensor, Kept]:
    parts = [torch.from_numpy(np.ascontiguousarray(p)) for p in (w.conv.T, w.decay, w.step_bias, w.head_norm)]
    kept = kept_for(d, *rows.shape[:2])
    return delta_net(torch.from_numpy(rows), d, parts, w.eps, ancestors, *tensors(past), kept), kept


def tensors(past: list[State]) -> tuple[Tensor, Tensor]:
    """States [N, Hv, Dk, Dv] and last inputs [N, W − 1, C]."""
    arrays = np.stack([s.heads for s in past]), np.stack([s.inputs for s in past])
    state, inputs = (torch.from_numpy(a.astype(np.float32)) for a in arrays)
    return state, inputs


def error(found: Tensor, expected: Array) -> float:
    """The largest one in units of the largest value."""
    return float(np.abs(found.numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 65, 257])
def test_trees_behind_states(nodes: int, share: int) -> None:
    """Two slots, one of which is empty: results, and states behind a path each; then again behind those."""
    for seed in range(1 if nodes == 257 else 3):
        rng = np.random.default_rng([nodes, share, seed])
        d = random_net(rng, share=share)
        w, past = random_weights(rng, d), [State.empty(d), State.empty(d)]
        for _ in range(2):
            trees = [random_parents(rng, nodes), list(range(-1, nodes - 1))]
            rows = rng.standard_normal((2, nodes, sum(d.projected_widths))).astype(np.float32)
            found, kept = passed(d, w, rows, past, ancestors_of(trees))
            before = tensors(past)
            for n, parents in enumerate(trees):
                expected, states = walk(d, w, rows[n], parents, past[n])
                assert error(found[n], expected) < 2e-5
                leaf = int(rng.integers(nodes))
                path = kept.select(n, torch.tensor(path_to(parents, leaf)))
                state, inputs = advanced(before[0][n], before[1][n], path)
                past[n] = states[leaf]
                assert error(state, past[n].heads) < 2e-6
                assert error(inputs, past[n].inputs) < 1e-6


@pytest.mark.parametrize("kind", ["keys alike", "fast decay, then none"])
def test_chains_at_the_ends_of_what_there_is(kind: str) -> None:
    """Of one token over and over powers of the system's matrix would be binomials. Behind fast decays sums of them are
    large, and their differences count."""
    rng = np.random.default_rng(3)
    d = random_net(rng)
    w, chain, past = random_weights(rng, d), list(range(-1, 255)), [State.empty(d)]
    rows = rng.standard_normal((1, 256, sum(d.projected_widths))).astype(np.float32)
    if kind == "keys alike":
        rows[:] = rows[:, :1]
        rows[..., -2 * d.value_heads : -d.value_heads] = 9  # steps of almost 1
        w = Weights(w.conv, np.full_like(w.decay, -1e-6), w.step_bias, w.head_norm)
    else:
        w = Weights(w.conv, np.full_like(w.decay, -10), w.step_bias, w.head_norm)
        rows[:, :128, -d.value_heads :], rows[:, 128:, -d.value_heads :] = 9, -9
    found, kept = passed(d, w, rows, past, Ancestors.of_chains(1, 256, torch.device("cpu")))
    expected, states = walk(d, w, rows[0], chain, past[0])
    state, _ = advanced(*tensors(past), kept)
    assert error(found[0], expected) < 1e-4 and error(state[0], states[-1].heads) < 1e-5


class Called(TorchDispatchMode):
    """The operators that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_pass_has_no_loop_over_nodes_and_waits_for_nothing() -> None:
    """As a captured graph must: the same operators whatever T is, and none whose result the host reads."""
    rng, found = np.random.default_rng(0), list[list[str]]()
    d = random_net(rng)
    w = random_weights(rng, d)
    for nodes in (17, 257):
        ancestors = ancestors_of([random_parents(rng, nodes)])
        rows = rng.standard_normal((1, nodes, sum(d.projected_widths))).astype(np.float32)
        with Called() as called:
            passed(d, w, rows, [State.empty(d)], ancestors)
        found.append(called.names)
    assert found[0] == found[1] and "aten.linalg_solve_triangular.default" in found[0]
    assert not [n for n in found[0] if "_local_scalar_dense" in n or "nonzero" in n or "equal" in n]
