"""Detection of flash-attn, for the passes that have no tree (prefill, the drafter's block).

Its wheels are built for one PyTorch, one CUDA and some GPUs, and a mismatched one fails in many ways: it cannot be
imported, lacks the function, or fails at its first call. So it is tested before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddtree_trt.errors import MissingDependency, UsageError

OPTION = "DDTREE_FLASH_ATTN"  # auto: use it where it works; on: refuse to open an engine without it; off: never
MODES = ("auto", "on", "off")

Flash = Callable[..., Tensor]
_logger = logging.getLogger("ddtree_trt.torch")
_TOLERANCE = 0.05  # of values of size 1 in half precision


def find_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> Flash | None:
    """`flash_attn_with_kvcache` if it passes a test on this device, else None.

    Raises UsageError for an unknown mode, and MissingDependency in mode `on` where it does not work.
    """
    mode = os.environ.get(OPTION, "auto").lower()
    if mode not in MODES:
        raise UsageError(f"{OPTION} must be one of {', '.join(MODES)}, not {mode!r}")
    if mode == "off" or (mode == "auto" and importlib.util.find_spec("flash_attn") is None):
        return None
    try:
        flash = importlib.import_module("flash_attn").flash_attn_with_kvcache
        _try(flash, device, dtype, head_dim)
    except Exception as error:  # a library for another torch may raise anything
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if mode == "on":
            raise MissingDependency(
                f"{OPTION} is on, but flash-attn does not work here ({reason}); install the wheel for torch "
                f"{torch.__version__}, or set {OPTION} to auto or off"
            ) from error
        _logger.warning("flash-attn is installed and does not work here (%s); our own kernels do its passes", reason)
        return None
    return flash


def _try(flash: Any, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Test `flash` on two rows of ones behind two of zeros in slot 1 of 2. Raises where it fails."""
    cache_k, cache_v = (torch.zeros(2, 8, 1, head_dim, dtype=dtype, device=device) for _ in range(2))
    q, k, v = (torch.ones(1, 2, heads, head_dim, dtype=dtype, device=device) for heads in (2, 1, 1))
    where = {"cache_seqlens": [2], "cache_batch_idx": [1]}
    control = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in where.items()}
    found = flash(q, cache_k, cache_v, k, v, **control, softmax_scale=1.0 / head_dim, causal=True)
    # The score of a visible row of ones is 1, of a row of zeros 0; only the values of the former are not 0.
    e = torch.e
    expected = torch.tensor([e / (e + 2), 2 * e / (2 * e + 2)]).view(1, 2, 1, 1)
    if found.shape != q.shape or not (found.float().cpu() - expected).abs().max() < _TOLERANCE:
        raise RuntimeError("it computes something else")
    if not (cache_k[1, 2:4] == 1).all() or (cache_k[0] != 0).any():
        raise RuntimeError("it does not append to the cache")
