"""Families without norms of queries and keys, and with a bias, on the kernels' own source: what the fused kernels do
not have runs in PyTorch beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import BY_SWITCHES, make_pair
from drafts import marginals
from engine_builds import build_torch_engine
from numerics import random_tree

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.base import DraftRequest, RoundRequest, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch.attention import Attention
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.pointwise import Pointwise, rotary_tables

ON_KERNELS = "ddtree_trt.runtime.engines.torch.engine.attention_for"


@pytest.mark.parametrize("family", BY_SWITCHES)
@pytest.mark.usefixtures("operators")
def test_an_engine_on_the_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and drafts are those of plain PyTorch in the same precision, within its rounding; rounds on the device
    go on from them."""
    pair = make_pair(tmp_path, family=BY_SWITCHES[family], head_dim=64, max_positions=512)
    plain = build_torch_engine(*pair, tmp_path / "e", precision="bf16", max_batch=2)
    monkeypatch.setattr(ON_KERNELS, lambda *given: Attention(given[-1]))
    kernels = open_engine(tmp_path / "e")
    assert isinstance(kernels, TorchEngine) and kernels.target.kernels
    rng, vocabulary = np.random.default_rng(1), kernels.manifest.target_dims.vocab_size
    prompt = rng.integers(0, vocabulary, 30)
    for engine in (plain, kernels):
        engine.prefill(0, prompt, rows="none", taps=True)
    draft, other = (e.draft([DraftRequest(0, 5, vocabulary, 1)])[0] for e in (plain, kernels))
    np.testing.assert_allclose(marginals(other).log_probs[:, 0], marginals(draft).log_probs[:, 0], atol=0.5)
    tree = random_tree(rng, 17, vocabulary)
    expected, found = (np.asarray(e.verify([VerifyRequest(0, tree)])[0].logits) for e in (plain, kernels))
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    assert kernels.rounds is not None and kernels.rounds.made_for([RoundRequest(0, 0, 16)]) is not None


@pytest.mark.usefixtures("operators")
def test_heads_without_norms_are_split_as_they_are() -> None:
    """To the bit: nothing is summed. Values pass unchanged, queries and keys are rotated."""
    tables = rotary_tables(TransformerDims(8, 8, 1, 4, 2, 64, 8, 1e-6, 1e4, 64), 50, torch.device("cpu"))
    qkv = torch.randn(2, 3, (4 + 2 * 2) * 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.tensor([[0, 7, 49], [3, 3, 31]], dtype=torch.int32)
    found, expected = (
        m.split_qkv(qkv, None, None, tables, positions, 1e-6, 4) for m in (Pointwise(kernels=True), Pointwise())
    )
    heads = qkv.unflatten(-1, (8, 64))
    for x, y, shape in zip(found, expected, ((2, 3, 4, 64), (2, 3, 2, 64), (2, 3, 2, 64)), strict=True):
        assert torch.equal(x, y) and x.is_contiguous() and x.shape == shape
    assert torch.equal(found[0][0, 0], heads[0, 0, :4])  # position 0 rotates nothing
    assert not torch.equal(found[0][0, 1], heads[0, 1, :4])
    assert torch.equal(found[2], heads[:, :, 6:])
