"""The Triton kernel of `products.py`: rows times weights, every sum in rising order of K."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit  # type: ignore[untyped-decorator]
def _weight_rows(i, first, columns, BN: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight's rows for columns i of a tile: where gated, the first half are gates, the others what they let
    through."""
    if GATED:
        half = columns // 2
        return tl.minimum(first // 2 + i % (BN // 2), half - 1) + i // (BN // 2) * half
    return tl.minimum(first + i, columns - 1)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w, scales, bias, out, rows, columns, inner, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    blocks = (rows + BM - 1) // BM  # programs that read the same weights follow each other
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    first = tl.program_id(0) // blocks * BN
    n, k = _weight_rows(tl.arange(0, BN), first, columns, BN, GATED), tl.arange(0, BK)
    x_at = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    # What comes before the wait runs beside the kernel before, which writes no weights.
    if PIECE:
        i, size = tl.arange(0, 128), tl.full((128,), PIECE, tl.int32)
        ahead = w + _weight_rows(i % BN, first, columns, BN, GATED).to(tl.int64) * w_stride
        ahead = ahead.to(tl.pointer_type(tl.int8)) + i // BN * PIECE
        prefetch: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $2;"
        tl.inline_asm_elementwise(prefetch, "=r,l,r", (ahead, size), dtype=tl.int32, is_pure=False, pack=1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    total = tl.full((BM, BN), 0.0, tl.float32)
    for start in range(0, inner, BK):
        total = tl.dot(tl.load(x_at + start), tl.load(w_at + start).to(x.dtype.element_ty), total)
    if scales is not None:
        total *= tl.load(scales + n)[None, :]
    if bias is not None:
        total += tl.load(bias + n).to(tl.float32)[None, :]
    n = first + tl.arange(0, BN)
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
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int, int],
    *,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """Compute `out` [M, N], x [M, K] times the transposed `weight` [N, K], times `scales` float32 [N], plus `bias` [N];
    or where `gated` [M, N / 2]: SiLU of the first half of the columns times the second half. `tile` as `products.Tile`,
    whose depth divides K. Each row of x and of the weight is contiguous, and so is `out`. `pdl` needs sm_90."""
    (rows, inner), columns = x.shape, len(weight)
    height, width, depth, warps, stages = tile
    options = {"launch_pdl": True} if pdl else {}
    # Of a program's 64 KB, which 128 threads ask for; chunks of prompts are bound by arithmetic.
    piece = min(512, weight.element_size() * inner * width // 128) // 16 * 16 if pdl and height <= 64 else 0
    _product[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
        x, weight, scales, bias, out, rows, columns, inner, x.stride(0), weight.stride(0),
        BM=height, BN=width, BK=depth, GATED=gated, PDL=pdl, PIECE=piece, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
