"""The Triton kernel of `products.py`: rows times weights, every sum in rising order of K."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(
    x: Any, w: Any, bias: Any, out: Any, rows: Any, columns: Any, inner: Any, x_stride: Any, w_stride: Any,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    blocks = (rows + BM - 1) // BM  # programs that read the same weights follow each other
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    first = tl.program_id(0) // blocks * BN
    n = first + tl.arange(0, BN)
    if GATED:  # the first half of the tile's columns are gates, the others what they let through
        i, half = tl.arange(0, BN), columns // 2
        n = tl.minimum(first // 2 + i % (BN // 2), half - 1) + i // (BN // 2) * half
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + tl.minimum(n, columns - 1).to(tl.int64)[None, :] * w_stride + k[:, None]
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    total = tl.full((BM, BN), 0.0, tl.float32)
    for start in range(0, inner, BK):
        total = tl.dot(tl.load(x_at + start), tl.load(w_at + start), total)
    if bias is not None:
        total += tl.load(bias + n, n < columns, 0.0).to(tl.float32)[None, :]
    if GATED:  # rounded where a product of its own would round
        gates, values = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        gates = gates.to(x.dtype.element_ty).to(tl.float32)
        total = values.to(x.dtype.element_ty).to(tl.float32) * (gates / (1 + tl.exp(-gates)))
        n, columns = first // 2 + tl.arange(0, BN // 2), columns // 2
    place = out + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), (m < rows)[:, None] & (n < columns)[None, :])


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int, int],
    *,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """Compute `out` [M, N], x [M, K] times the transposed `weight` [N, K] plus `bias` [N], or where `gated` [M, N / 2]:
    SiLU of the first half of the columns times the second half. `tile` as `products.Tile`, whose depth divides K. Each
    row of x and of the weight is contiguous, and so is `out`. `pdl` needs sm_90."""
    (rows, inner), columns = x.shape, len(weight)
    height, width, depth, warps, stages = tile
    options = {"launch_pdl": True} if pdl else {}
    _product[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
        x, weight, bias, out, rows, columns, inner, x.stride(0), weight.stride(0),
        BM=height, BN=width, BK=depth, GATED=gated, PDL=pdl, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
