"""The parts of a device round: its noise, and the operators of the host beside their reference."""

from __future__ import annotations

import kernel_reference as plugin_reference
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_rounds import seed_of
from truth import FALSE_ALARM, chi_square

from ddtree_trt.runtime.engines.torch.device_round import HostOps, gumbel


def test_noise_draws_from_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5])
    seeds = torch.tensor([seed_of(7, i) for i in range(40)])
    for temperature in (0.6, 1.0):
        noise = gumbel(seeds, torch.arange(500).expand(40, -1), len(logits))
        assert noise.dtype == torch.float32 and torch.isfinite(noise).all()
        drawn = (logits + temperature * noise).argmax(-1).flatten().tolist()
        p = (logits / temperature).softmax(0).tolist()
        counts = {(t,): drawn.count(t) for t in range(len(p))}
        assert chi_square(counts, {(t,): q for t, q in enumerate(p)}) > FALSE_ALARM


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds = torch.tensor([seed_of(0, 0), seed_of(0, 1)])
    whole = gumbel(seeds, torch.tensor([[5, 6], [6, 9]]), 50)
    assert torch.equal(whole[:1, 1:], gumbel(seeds[:1], torch.tensor([[6]]), 50))
    assert torch.equal(whole[..., :7], gumbel(seeds, torch.tensor([[5, 6], [6, 9]]), 7))
    assert not torch.equal(whole[0, 1], whole[1, 0])
    assert abs(float(np.corrcoef(whole.flatten(0, 1).numpy()[:2])[0, 1])) < 0.5
    assert seed_of(None, 0) != seed_of(None, 0)


@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_the_hosts_operators_are_the_reference(seed: int, sizes: list[int]) -> None:
    """Masks and walks of padded trees, as the kernels compute them; neither is written in terms of the other."""
    rng, tokens = np.random.default_rng(seed), 70
    parents = np.full((len(sizes), tokens), -1, np.int32)
    for row, size in zip(parents, sizes, strict=True):
        row[1:size] = [rng.integers(0, i) for i in range(1, size)]
    token_ids, choices = (rng.integers(0, 4, parents.shape).astype(np.int32) for _ in range(2))
    past = rng.integers(0, 50, len(sizes)).astype(np.int32)
    words = -(-tokens // 32) + 1
    mask = torch.full((len(sizes), tokens, words), 7, dtype=torch.int32)
    tree, said, drafted = (torch.from_numpy(a) for a in (parents, choices, token_ids))
    HostOps().packed_mask(tree, mask)
    path = torch.zeros(parents.shape, dtype=torch.int32)
    lengths, following, new_past = (torch.zeros(len(sizes), dtype=torch.int32) for _ in range(3))
    counts = torch.tensor(sizes, dtype=torch.int32)
    HostOps().walk(tree, drafted, said, counts, torch.from_numpy(past), path, lengths, following, new_past)
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(mask[n].numpy(), plugin_reference.packed_mask(parents[n], words))
        nodes = plugin_reference.walk(parents[n], token_ids[n], choices[n], size)
        assert path[n].tolist() == [*nodes, *[-1] * (tokens - len(nodes))]
        found = (int(lengths[n]), int(following[n]), int(new_past[n]))
        assert found == (len(nodes), choices[n, nodes[-1]], past[n] + len(nodes))
