"""Parts of the PyTorch engine that only a GPU uses, as far as a CPU can show them."""

from pathlib import Path
from typing import Any

import kernel_reference as reference
import numpy as np
import pytest
import torch
from drafts import marginals
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.errors import MissingDependency
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import DraftRequest
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.attention import OPERATORS, Attention, Place
from ddtree_trt.runtime.engines.torch.graphs import Upload
from ddtree_trt.runtime.engines.torch.pointwise import Pointwise, rotary_tables
from workbench.random_pair import find_shape, random_torch_engine

CPU = torch.device("cpu")
N, SLOTS, S, HQ, HKV, D = 2, 3, 40, 4, 2, 16
PAST, SLOT_IDS = (7, 20), (2, 0)


def case(tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Place]:
    """q, k, v and caches in float32, and a random tree's mask."""
    generator = torch.Generator().manual_seed(tokens)
    new, cache = (N, tokens, HKV, D), (SLOTS, HKV, S, D)
    rng = np.random.default_rng(tokens)
    mask = torch.from_numpy(np.stack([reference.packed_mask(reference.random_parents(rng, tokens)) for _ in range(N)]))
    place = Place(torch.tensor(SLOT_IDS, dtype=torch.int32), torch.tensor(PAST, dtype=torch.int32), mask)
    q, k, v, cache_k, cache_v = (
        torch.randn(shape, generator=generator) for shape in ((N, tokens, HQ, D), new, new, cache, cache)
    )
    return (q, k, v, cache_k, cache_v), place


@pytest.mark.parametrize("mode", MaskMode)
@pytest.mark.parametrize("tokens", [1, 9])
def test_dense_attention_is_the_reference(mode: MaskMode, tokens: int) -> None:
    tensors, place = case(tokens)
    q, k, v, past_k, past_v = (t.numpy().copy() for t in tensors)
    assert place.mask is not None
    slots, past, mask = (t.numpy() for t in (place.slots, place.past, place.mask))
    expected, keys, values = reference.attention(q, k, v, past_k, past_v, slots, past, mask, mode, 0.3)
    found = Attention()(*tensors, place, mode, 0.3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(tensors[3].numpy(), keys)
    np.testing.assert_array_equal(tensors[4].numpy(), values)


@pytest.mark.parametrize("mode", MaskMode)
@pytest.mark.parametrize("window", [1, 12])
def test_a_window_reads_the_rows_that_it_reaches(mode: MaskMode, window: int) -> None:
    """Those before them are NaN, which even a weight of zero would let through."""
    tokens = 9
    (q, k, v, cache_k, cache_v), place = case(tokens)
    assert place.mask is not None
    expected = []
    for n, (slot, past) in enumerate(zip(place.slots.tolist(), place.past.tolist(), strict=True)):
        parts = (cache_k, k), (cache_v, v)
        keys, values = (torch.cat((cache[slot, :, :past], new[n].transpose(0, 1)), 1) for cache, new in parts)
        mask = reference.visible(mode, tokens, place.mask[n].numpy())
        seen = F.pad(torch.from_numpy(mask), (past, 0), value=True)
        rows, columns = past + torch.arange(tokens)[:, None], torch.arange(past + tokens)
        seen &= (rows - columns).abs() < window
        expected.append(F.scaled_dot_product_attention(
            q[n].transpose(0, 1), keys, values, attn_mask=seen, scale=0.3, enable_gqa=True
        ).transpose(0, 1))  # fmt: skip
        for cache in (cache_k, cache_v):
            cache[slot, :, : max(0, past + 1 - window)] = torch.nan
    found = Attention()(q, k, v, cache_k, cache_v, place, mode, 0.3, window)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("vocabulary", "top_k"), [(1, 1), (130, 130), (49152, 64), (151_936, 256)])
def test_the_kernels_candidates_are_pytorchs(operators: None, vocabulary: int, top_k: int) -> None:
    logits = 5 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    best, ids = torch.empty(3, top_k), torch.empty(3, top_k, dtype=torch.int32)
    torch.ops.ddtree.draft_top(logits, False, best, ids)
    expected = logits.topk(top_k, -1)
    assert torch.equal(best, expected.values) and torch.equal(ids.long(), expected.indices)
    torch.ops.ddtree.draft_top(logits, True, best, ids)
    torch.testing.assert_close(best, expected.values - logits.logsumexp(-1, keepdim=True), atol=5e-6, rtol=1e-6)
    assert torch.equal(ids.long(), expected.indices)


HALVES = {"bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}  # type, half a step relative to a value


def assert_rounded_once(found: Tensor, exact: Tensor, half_step: float) -> None:
    """Whether `found` is `exact` within one rounding, and what float32 sums in another order."""
    torch.testing.assert_close(found.double(), exact, rtol=1.02 * half_step, atol=1e-5)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("width", [8, 192, 2560, 4096])
def test_the_kernels_norm(operators: None, precision: str, width: int) -> None:
    dtype, half_step = HALVES[precision]
    x, update, weight = (torch.randn(shape).to(dtype) for shape in ((2, 3, width), (2, 3, width), (width,)))
    for added in (update, None):
        total, normed = Pointwise(kernels=True).add_norm(x, added, weight, 1e-6)
        expected, _ = Pointwise().add_norm(x, added, weight, 1e-6)
        assert torch.equal(total, expected)
        exact = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        assert_rounded_once(normed, exact, half_step)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (1, 1, 64), (8, 2, 128), (3, 3, 128)])
def test_the_kernels_split_and_turn(operators: None, precision: str, heads: tuple[int, int, int]) -> None:
    dtype, half_step = HALVES[precision]
    q_heads, kv_heads, size = heads
    dims = TransformerDims(8, 8, 1, q_heads, kv_heads, size, 8, 1e-6, 1e4, 64)
    tables = rotary_tables(dims, 50, CPU)
    qkv = torch.randn(2, 3, (q_heads + 2 * kv_heads) * size).to(dtype)
    q_norm, k_norm = (torch.rand(size).to(dtype) + 0.5 for _ in range(2))
    positions = torch.tensor([[0, 7, 49], [3, 3, 31]], dtype=torch.int32)
    found = Pointwise(kernels=True).split_qkv(qkv, q_norm, k_norm, tables, positions, 1e-6, (q_heads, kv_heads))
    wide, wide_tables = (qkv.double(), q_norm.double(), k_norm.double()), tables.double()
    exact = Pointwise().split_qkv(*wide, wide_tables, positions, 1e-6, (q_heads, kv_heads))
    for part, (x, expected) in enumerate(zip(found, exact, strict=True)):
        assert x.is_contiguous() and x.shape == expected.shape
        if part == 2:
            assert torch.equal(x.double(), expected)
        else:  # turning adds two products, whose sum may be far smaller than they are
            torch.testing.assert_close(x.double(), expected, rtol=1.02 * half_step, atol=2e-4)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("inner", [8, 512, 2056])
def test_the_kernels_swiglu(operators: None, precision: str, inner: int) -> None:
    dtype, half_step = HALVES[precision]
    gate_up = (4 * torch.randn(2, 3, 2 * inner)).to(dtype)
    gate_up[0, 0, :2] = torch.tensor([-60.0, 60.0]).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded_once(Pointwise(kernels=True).swiglu(gate_up), F.silu(gate) * up, half_step)


def test_the_operators_refuse_wrong_tensors(operators: None) -> None:
    ops, half = torch.ops.ddtree, torch.bfloat16

    def halves(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=half)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    x, w, cache, one, keep = halves(2, 16), halves(16), halves(2, 1, 2, 8, 64), ints(1), ints(1, 3)
    parents, mask = torch.tensor([[-1, 0, 0]], dtype=torch.int32), ints(1, 3, 1)
    q, kv, scores = halves(1, 3, 4, 64), halves(1, 3, 2, 64), torch.zeros(2, 7)
    best, ids = torch.zeros(2, 3), ints(2, 3)

    def attend(k: Tensor = kv, space: int = 1 << 20) -> None:
        scratch = torch.zeros(space, dtype=torch.uint8)
        ops.tree_attention(q, k, kv, cache[0], cache[1], one, one, mask, 0, 0.125, q.clone(), scratch, 2)

    attend()
    calls: list[tuple[Any, str]] = [
        (lambda: ops.draft_top(scores, True, best[:1], ids), "best must have shape"),
        (lambda: ops.add_rms_norm(x.float(), None, w.float(), 1e-6, None, x.float()), "x must be bfloat16 or float16"),
        (lambda: ops.add_rms_norm(x, x, w, 1e-6, None, x.clone()), "status 1"),
        (lambda: ops.swiglu(x, x), "gate_up must have shape"),
        (lambda: ops.packed_mask(parents.long(), mask), "parents must be"),
        (lambda: ops.compact(cache.transpose(3, 4), one, one, keep, one), "contiguous"),
        (lambda: attend(k=halves(1, 2, 2, 64)), "k must"),
        (lambda: attend(space=64), "status 5"),
    ]
    for call, text in calls:
        with pytest.raises(RuntimeError, match=text):
            call()


def test_a_library_of_before_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Namespace:
        pass

    def load(path: str) -> None:
        for name in OPERATORS[:-1]:
            setattr(namespace, name, None)

    namespace = Namespace()
    monkeypatch.setattr(torch.ops, "ddtree", namespace)
    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(torch_attention, "find", lambda name: tmp_path / name)
    with pytest.raises(MissingDependency, match="older than this version: no swiglu; run `make plugins`"):
        torch_attention.load_operators()


def test_equal_shapes_go_up_to_equal_addresses() -> None:
    shapes = [(3,), (3,), (3, 5), (3, 5, 2)]
    upload = Upload(CPU, *shapes)
    rng = np.random.default_rng(0)
    before: list[int] = []
    for _ in range(2):
        arrays = [rng.integers(-9, 9, shape).astype(np.int32) for shape in shapes]
        views = upload.send(*arrays)
        for view, array in zip(views, arrays, strict=True):
            np.testing.assert_array_equal(view.numpy(), array)
            assert view.is_contiguous() and (view.data_ptr() - views[0].data_ptr()) % 16 == 0
        addresses = [view.data_ptr() for view in views]
        assert before in ([], addresses)
        before = addresses


@pytest.mark.parametrize("name", ["micro", "micro-hybrid"])
def test_random_weights_make_an_engine(name: str) -> None:
    """Without a checkpoint: every weight the layout names, logits about as peaked as a trained network's."""
    shape, limits = find_shape(name), Limits(max_seq_len=128, max_batch=1)
    engine, weights = random_torch_engine(name, shape, "fp32", limits, torch.device("cpu"))
    assert engine.manifest.name == f"random-{name}" and all(torch.isfinite(w).all() for w in weights.values())
    verdict = engine.prefill(0, np.arange(1, 40), rows="all", taps=True)
    assert 2 < np.asarray(verdict.logits).std() < 50
    assert len(set(verdict.choices.tolist())) > 20
    (draft,) = engine.draft([DraftRequest(0, 3, 4, 3)])
    assert np.isfinite(marginals(draft).log_probs).all()
