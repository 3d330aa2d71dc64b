"""The Triton kernel of `products.py`: rows times weights, every sum in rising order of K."""

import torch
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


@triton.jit  # type: ignore[untyped-decorator]
def _sum_in_pairs(x, ROWS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS] of x [ROWS, SIZE], neighbours first: in an order that no tile and no number of threads changes."""
    for step in tl.static_range(SIZE.bit_length() - 1):
        left, right = tl.split(tl.reshape(x, (ROWS, SIZE >> (step + 1), 2)))
        x = left + right
    return tl.reshape(x, (ROWS,))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    x, w, scales, bias, squares, epsilon, m, first, rows, columns, inner, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: rows m of x with the weight's rows for the tile that begins at column `first`, divided by the
    root of their mean square where that is given by `squares`."""
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
    if squares is not None:
        g, groups, whole = tl.arange(0, 32), inner // 32, tl.full((BM,), 0.0, tl.float32)
        at = squares + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * groups + g[None, :]
        for start in range(0, groups, 32):
            whole += _sum_in_pairs(tl.load(at + start, (start + g < groups)[None, :], 0.0), BM, 32)
        total *= (1 / tl.sqrt_rn(whole / inner + epsilon))[:, None]
    if bias is not None:
        total += tl.load(bias + n).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w, scales, bias, squares, epsilon, out, onto, norm, unscaled, sums, rows, columns, inner, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    blocks = (rows + BM - 1) // BM  # programs that read the same weights follow each other
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    first = tl.program_id(0) // blocks * BN
    total = _tile(
        x, w, scales, bias, squares, epsilon, m, first, rows, columns, inner, x_stride, w_stride,
        BM, BN, BK, GATED, PDL, PIECE,
    )  # fmt: skip
    n = first + tl.arange(0, BN)
    if GATED:  # rounded where a product of its own would round
        gates, values = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        gates = gates.to(x.dtype.element_ty).to(tl.float32)
        total = values.to(x.dtype.element_ty).to(tl.float32) * (gates / (1 + tl.exp(-gates)))
        n, columns = first // 2 + tl.arange(0, BN // 2), columns // 2
    place, inside = m.to(tl.int64)[:, None] * columns + n[None, :], (m < rows)[:, None] & (n < columns)[None, :]
    if onto is not None:  # rounded where a product of its own and a sum would round
        total = total.to(x.dtype.element_ty).to(tl.float32) + tl.load(onto + place, inside, 0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32)
        weighted = total * tl.load(norm + n, n < columns, 0.0).to(tl.float32)[None, :]
        tl.store(unscaled + place, weighted.to(out.dtype.element_ty), inside)
        of_groups = _sum_in_pairs(tl.reshape(total * total, (BM * BN // 32, 32)), BM * BN // 32, 32)
        g, groups = first // 32 + tl.arange(0, BN // 32), columns // 32
        at = sums + m.to(tl.int64)[:, None] * groups + g[None, :]
        tl.store(at, tl.reshape(of_groups, (BM, BN // 32)), (m < rows)[:, None] & (g < groups)[None, :])
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    """`gumbel` of `cpp_plugins/include/ddtree/noise.h`, in float64 of bits uint64: the state of a token."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    u = ((bits >> 1) | 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2^-63
    u = tl.minimum(u, 0.9999999403953552).to(tl.float64)
    # log1p(-u): 1 - u is exact in float64 where u has no bits below 2^-44; the series is where it is smaller.
    return -tl.log(tl.where(u < 2.0**-20, u * (1 + u * (0.5 + u / 3)), -tl.log(1 - u)))


@triton.jit
def _larger(x, y):  # type: ignore[no-untyped-def]
    return tl.maximum(x, y)


@triton.jit
def _better(value, token, other, other_token):  # type: ignore[no-untyped-def]
    """The larger value and its token; of equal ones the lower token."""
    takes = (other > value) | ((other == value) & (other_token < token))
    return tl.where(takes, other, value), tl.where(takes, other_token, token)


@triton.jit
def _best(logits, n, columns, temperature, state):  # type: ignore[no-untyped-def]
    """Of each row the largest of logits [M, N] with their noise, in float64, and the lowest of its columns n [N]."""
    value = logits.to(tl.float64)
    if tl.reduce(temperature, 0, _larger) > 0:
        value += temperature[:, None] * _gumbel(state[:, None] + n.to(tl.uint64)[None, :] * 0x9E3779B97F4A7C15)
    value = tl.where((n < columns)[None, :] & (value == value), value, -float("inf"))
    return tl.reduce((value, tl.broadcast_to(n[None, :], value.shape)), 1, _better)


@triton.jit(do_not_specialize=["rows", "tokens"])  # type: ignore[untyped-decorator]
def _best_of_tiles(  # type: ignore[no-untyped-def]
    x, w, scales, positions, temperatures, seeds, values, ids, rows, tokens, columns, inner, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    blocks = (rows + BM - 1) // BM
    m, tile = tl.program_id(0) % blocks * BM + tl.arange(0, BM), tl.program_id(0) // blocks
    total = _tile(
        x, w, scales, None, None, 0.0, m, tile * BN, rows, columns, inner, x_stride, w_stride,
        BM, BN, BK, False, PDL, PIECE,
    )  # fmt: skip
    row = tl.minimum(m, rows - 1)
    temperature = tl.load(temperatures + row // tokens).to(tl.float64)
    behind = (tl.load(positions + row).to(tl.int64) + 1).to(tl.uint64)
    state = tl.load(seeds + row // tokens).to(tl.uint64) + ((behind << 24) + 1) * 0x9E3779B97F4A7C15
    # Half of the columns at a time, whose noise in float64 the registers hold.
    lower, upper = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
    best, token = _best(lower, tile * BN + tl.arange(0, BN // 2), columns, temperature, state)
    value, other = _best(upper, tile * BN + BN // 2 + tl.arange(0, BN // 2), columns, temperature, state)
    best, token = _better(best, token, value, other)
    place = m.to(tl.int64) * ((columns + BN - 1) // BN) + tile
    tl.store(values + place, best, m < rows)
    tl.store(ids + place, token, m < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_rows(values, ids, choices, tiles, SIZE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    tile = tl.arange(0, SIZE)
    place = tl.program_id(0).to(tl.int64) * tiles + tile
    value = tl.load(values + place, tile < tiles, -float("inf"))
    _, token = tl.reduce((value, tl.load(ids + place, tile < tiles, 2**31 - 1)), 0, _better)
    tl.store(choices + tl.program_id(0), token)


def _ahead(weight: Tensor, height: int, width: int, *, pdl: bool) -> int:
    """Bytes that each of 128 threads asks for, of the first 64 KB of a program's weights; chunks of prompts are bound
    by arithmetic."""
    return min(512, weight.element_size() * weight.shape[1] * width // 128) // 16 * 16 if pdl and height <= 64 else 0


def launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int, int],
    *,
    gated: bool = False,
    scaled: tuple[Tensor, float] | None = None,
    onto: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Compute `out` [M, N], x [M, K] times the transposed `weight` [N, K], times `scales` float32 [N], plus `bias` [N];
    or where `gated` [M, N / 2]: SiLU of the first half of the columns times the second half. `tile` as `products.Tile`,
    whose depth divides K. `scaled`: of x divided by the root of its mean square, which sums of 32 squares each float32
    [M, K / 32] give, and an epsilon. `onto`: added to rows [M, N]; for a norm's weight [N] `out` times the weight
    [M, N] and the sums of its squares [M, N / 32] are written too. Each row of x and of the weight is contiguous, and
    so are the others. `pdl` needs sm_90."""
    (rows, inner), columns = x.shape, len(weight)
    height, width, depth, warps, stages = tile
    options = {"launch_pdl": True} if pdl else {}
    _product[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
        x, weight, scales, bias, *(scaled or (None, 0.0)), out, *(onto or [None] * 4), rows, columns, inner,
        x.stride(0), weight.stride(0), BM=height, BN=width, BK=depth, GATED=gated, PDL=pdl,
        PIECE=_ahead(weight, height, width, pdl=pdl), num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip


def choose(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    draws: tuple[Tensor, Tensor, Tensor],
    choices: Tensor,
    tile: tuple[int, int, int, int, int],
    *,
    pdl: bool = False,
) -> None:
    """The tokens that the operator `choose` takes of the products' logits float32 [N·T, V] into `choices` int32 [N, T],
    and no logits: the best of each tile of them, then the best of these. `draws`: positions int32 [N, T], temperatures
    float32 [N] and seeds int64 [N]; the others as `launch`."""
    (rows, inner), columns = x.shape, len(weight)
    height, width, depth, warps, stages = tile
    tiles = triton.cdiv(columns, width)
    values, ids = (x.new_empty(rows, tiles, dtype=kind) for kind in (torch.float64, torch.int32))
    options = {"launch_pdl": True} if pdl else {}
    _best_of_tiles[(triton.cdiv(rows, height) * tiles,)](
        x, weight, scales, *draws, values, ids, rows, choices.shape[1], columns, inner, x.stride(0), weight.stride(0),
        BM=height, BN=width, BK=depth, PDL=pdl, PIECE=_ahead(weight, height, width, pdl=pdl), num_warps=warps,
        num_stages=stages, **options,
    )  # fmt: skip
    _best_of_rows[(rows,)](values, ids, choices, tiles, SIZE=triton.next_power_of_2(tiles), PDL=pdl, **options)
