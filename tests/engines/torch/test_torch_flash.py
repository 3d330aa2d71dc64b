"""flash-attn: a wheel that works is used, and one that does not ends nothing."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import case
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.errors import MissingDependency, UsageError
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.attention import OPTION, Attention, Scratch, find_flash

CPU = torch.device("cpu")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """flash-attn's function for caches [slots, S, Hkv, D], by its documentation: new rows are appended in place; a
    causal mask is aligned to the last key."""
    out = torch.empty_like(q)
    for n, (slot, past) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        end = past + q.shape[1]
        k_cache[slot, past:end], v_cache[slot, past:end] = k[n], v[n]
        keys, values = (c[slot, :end].transpose(0, 1)[None] for c in (k_cache, v_cache))
        seen = torch.ones(q.shape[1], end, dtype=torch.bool)
        if causal:
            seen = seen.tril(end - q.shape[1])
        rows = q[n].transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        out[n] = attended[0].transpose(0, 1)
    return out


def install(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """A package `flash_attn` whose function this is; an exception is what importing it raises."""
    module = ModuleType("flash_attn")
    if not isinstance(function, Exception):
        module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
    real = importlib.import_module

    def import_module(name: str) -> Any:
        if name == "flash_attn" and isinstance(function, Exception):
            raise function
        return real(name)

    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("importlib.import_module", import_module)


@pytest.mark.parametrize("mode", [MaskMode.CAUSAL, MaskMode.NONE])
@pytest.mark.parametrize("option", [None, "auto", "on", "ON"])
def test_flash_attention_takes_passes_without_a_tree(
    mode: MaskMode, option: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, flash_attn_with_kvcache)
    if option:
        monkeypatch.setenv(OPTION, option)
    tensors, place = case(6)
    q, k, v, cache_k, cache_v = (t.clone() for t in tensors)
    expected = Attention()(q, k, v, cache_k, cache_v, place, mode, 0.25)
    flash = find_flash(CPU, torch.float32, 16)
    assert flash is flash_attn_with_kvcache
    found = Attention(Scratch(0, CPU), flash)(*tensors, place, mode, 0.25)
    torch.testing.assert_close(found, expected)
    for tensor, copy in zip(tensors[3:], (cache_k, cache_v), strict=True):
        assert torch.equal(tensor, copy)


def of_another_torch(*_: object, **__: object) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nand more lines")


def wrong(*given: Any, **options: Any) -> Tensor:
    return flash_attn_with_kvcache(*given, **options) + 1


def forgets(q: Tensor, cache_k: Tensor, cache_v: Tensor, *new: Tensor, **options: Any) -> Tensor:
    return flash_attn_with_kvcache(q, cache_k.clone(), cache_v.clone(), *new, **options)


def takes_no_slots(q: Tensor, cache_k: Tensor, cache_v: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor) -> Tensor:
    return q


BROKEN: list[Any] = [
    *(ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi"), OSError("libcudart.so.12: no such file")),
    *(RuntimeError("built for torch 2.4"), AttributeError("no such thing"), None),
    *(of_another_torch, wrong, forgets, takes_no_slots),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: getattr(broken, "__name__", str(broken)))
def test_a_wheel_that_does_not_work_ends_nothing(
    broken: Exception | Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, broken)
    monkeypatch.setattr(torch_attention, "load_operators", lambda: None)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch_attention, "find_flash", lambda device, *kind: find_flash(CPU, torch.float32, 16))
    with caplog.at_level(logging.WARNING):
        attention = torch_attention.attention_for(cuda, torch.bfloat16, 64, Scratch(0, CPU))
    assert attention.kernels and attention.flash is None
    (record,) = caplog.records
    assert "flash-attn is installed and does not work here" in record.message and "\n" not in record.message
    monkeypatch.setenv(OPTION, "on")
    with pytest.raises(MissingDependency, match="DDTREE_FLASH_ATTN is on, but flash-attn does not work here"):
        find_flash(CPU, torch.float32, 16)
    monkeypatch.setenv(OPTION, "off")
    caplog.clear()
    assert find_flash(CPU, torch.float32, 16) is None and not caplog.records


def test_without_the_package_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert find_flash(CPU, torch.float32, 16) is None and not caplog.records
    monkeypatch.setenv(OPTION, "on")
    with pytest.raises(MissingDependency, match=r"No module named 'flash_attn'\); install the wheel for torch"):
        find_flash(CPU, torch.float32, 16)
    monkeypatch.setenv(OPTION, "maybe")
    with pytest.raises(UsageError, match="DDTREE_FLASH_ATTN must be one of auto, on, off, not 'maybe'"):
        find_flash(CPU, torch.float32, 16)
