"""Matrix products: PyTorch's, and on GPUs those that add every row's products in one order.

cuBLAS takes another kernel for another number of rows, and with it another order: a token's logits would depend on the
size of the tree it is verified in. Here one program computes a tile of the result over all of K, in rising order and
with one sum per element, whatever the tile's size, so that a row's bits depend on nothing but the row. Weights are read
at the speed of memory all the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.errors import told

_logger = logging.getLogger("ddtree_trt.torch")
_CHECKED = (1, 3, 17, 65, 200)  # rows of the products that are compared when an engine is opened: all heights of tiles
_LARGEST = 448  # value of e4m3
_PART = 8192  # rows that are quantised at a time
_CHOICE_ROWS = 64  # of a tile in which tokens are chosen: noise in float64 takes the registers of more
_GROUP = 32  # squares of a row that are summed together
_TABLES = "head", "embedding"
_STEP = 16  # of K: what one instruction multiplies
_PDL_SM = (9, 0)  # the first with programmatic dependent launches


class Tile(NamedTuple):
    """What one program computes: `height` rows and `width` columns, in steps of `depth` along K."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int  # of loads in flight


# By the height of the tile, for weights with at most so many rows: (width, depth, warps, stages). Those of 16 and 64
# rows are the fastest measured on an H100, over the shapes of Qwen3-8B; the others are chosen without a measurement.
_TILES: tuple[tuple[float, dict[int, tuple[int, int, int, int]]], ...] = (
    (4096, {16: (32, 256, 4, 4), 64: (32, 256, 4, 4), 128: (32, 128, 8, 4)}),
    (8191, {16: (32, 128, 4, 5), 64: (64, 128, 4, 4), 128: (64, 128, 8, 4)}),
    (65536, {16: (64, 128, 4, 4), 64: (64, 128, 4, 4), 128: (64, 128, 8, 4)}),
    (math.inf, {16: (64, 128, 4, 4), 64: (128, 128, 8, 3), 128: (128, 128, 8, 3)}),
)
_MANY = Tile(128, 128, 64, 8, 4)  # of more than 128 rows: chunks of prompts, batches of trees


def tile_for(rows: int, columns: int, inner: int, shared_bytes: int) -> Tile:
    """The tile of a product of `rows` rows with weights [columns, inner] on a GPU whose programs have so much shared
    memory; `inner` is a multiple of 16."""
    tile = _MANY
    for height, rest in next(tiles for most, tiles in _TILES if columns <= most).items():
        if rows <= height:
            tile = Tile(height, *rest)
            break
    depth = math.gcd(tile.depth, inner)
    stages = shared_bytes // (2 * depth * (tile.height + tile.width))
    return tile._replace(depth=depth, stages=max(1, min(tile.stages, stages)))


@dataclass(frozen=True)
class Scaled:
    """A weight [N, K] in FP8, each row divided by its scale: half the bytes to read, and the same arithmetic."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N]

    @staticmethod
    def of(weight: Tensor) -> Scaled:
        """The nearest to a weight: a row's largest element becomes the largest of e4m3."""
        scales = (weight.abs().amax(-1).float() / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        parts = zip(weight.split(_PART), scales.split(_PART), strict=True)  # a whole head in float32 would be large
        return Scaled(torch.cat([(w.float() / s[:, None]).to(torch.float8_e4m3fn) for w, s in parts]), scales)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return 2

    def __len__(self) -> int:
        return len(self.values)


Weight = Tensor | Scaled


class Draws(NamedTuple):
    """What tokens are chosen by, beside logits: the largest where a temperature is 0, drawn by a seed elsewhere."""

    positions: Tensor  # int32 [N, T] of the nodes in the whole sequence
    temperatures: Tensor  # float32 [N]
    seeds: Tensor  # int64 [N]


class Normed(NamedTuple):
    """Rows whose RMS norm is finished by the product that takes them."""

    unscaled: Tensor  # [N, T, H], times the norm's weight
    squares: Tensor  # float32 [N, T, H / 32], sums of 32 squares each of the rows before
    epsilon: float


class Products:
    """PyTorch's, of rows x [..., K] with weights [N, K]; those in FP8 for their numerics, not for speed."""

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """[..., N], of x's type; the bias is [N]."""
        if isinstance(weight, Scaled):
            found = F.linear(x.float(), weight.values.float()) * weight.scales
            return (found if bias is None else found + bias).to(x.dtype)
        return F.linear(x, weight, bias)

    def swiglu(self, x: Tensor, weight: Weight, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gates) · values [..., N / 2], the halves of the product's columns; `swiglu` computes it of these."""
        return swiglu(self(x, weight))

    def logits(self, hidden: Tensor, head: Weight, out: Tensor | None = None) -> Tensor:
        """float32 [R, V] of hidden states [R, K], kept in the float32 they are summed in: half precisions have steps
        between large logits in which different tokens would look equal."""
        if out is None:
            out = torch.empty(len(hidden), len(head), device=hidden.device)
        if isinstance(head, Scaled):
            return out.copy_(self(hidden.float(), head))
        if hidden.is_cuda and head.dtype != torch.float32:
            return torch.ops.aten.mm.dtype_out(hidden.to(head.dtype), head.t(), torch.float32, out=out)
        return torch.mm(hidden.to(head.dtype), head.t(), out=out)

    def choose(
        self, hidden: Tensor, head: Weight, draws: Draws, choices: Tensor, logits: Tensor, operator: Callable[..., None]
    ) -> None:
        """The target's tokens behind hidden states [N·T, K] into choices int32 [N, T]: those that the operator `choose`
        takes of the logits, for which there is room in `logits` float32 [rows, V]."""
        rows = self.logits(hidden, head, logits[: len(hidden)])
        operator(rows.unflatten(0, choices.shape), *draws, choices)


PYTORCH = Products()


def ready_head(head: Weight) -> Weight:
    """A head as `Products.logits` takes it: float32 sums of half-precision products are available in CUDA only."""
    return head if isinstance(head, Scaled) or head.is_cuda else head.float()


class FixedOrder(Products):
    """By our kernel, for weights [N, K] in half precision or FP8 of which K is a multiple of 16."""

    def __init__(
        self, launch: Callable[..., None], shared_bytes: int, *, pdl: bool, choose: Callable[..., None] | None = None
    ) -> None:
        """`launch` is `product_kernel`'s, and `choose`; without the latter tokens are chosen of written logits.
        `shared_bytes` as `tile_for`; `pdl`: programmatic dependent launches."""
        self._launch = launch
        self._choose = choose
        self._shared_bytes = shared_bytes
        self._pdl = pdl
        self._one_height: set[torch.Size] = set()  # of weights whose products all have tiles of 64 rows

    def __call__(self, x: Tensor | Normed, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self._run(x, weight, bias)

    def swiglu(self, x: Tensor | Normed, weight: Weight, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        return self._run(x, weight, gated=True)

    @staticmethod
    def adds(norms: Iterable[Tensor]) -> bool:
        """Whether `add` takes norms of these weights: in bf16, whose range holds a row before it is scaled."""
        return all(norm.dtype == torch.bfloat16 and len(norm) % _GROUP == 0 for norm in norms)

    def add(self, x: Tensor, weight: Weight, onto: Tensor, norm: Tensor, epsilon: float) -> tuple[Tensor, Normed]:
        """Rows `onto` [N, T, H] plus the product of rows x [N, T, K], and their norm, whose weight [H] is `norm`."""
        out, unscaled = torch.empty_like(onto), torch.empty_like(onto)
        squares = onto.new_empty(*onto.shape[:-1], onto.shape[-1] // _GROUP, dtype=torch.float32)
        self._run(x, weight, out=out, onto=(onto, norm, unscaled, squares))
        return out, Normed(unscaled, squares, epsilon)

    def logits(self, hidden: Tensor, head: Weight, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(hidden), len(head), device=hidden.device)
        return self._run(hidden if isinstance(head, Scaled) else hidden.to(head.dtype), head, out=out)

    def choose(
        self, hidden: Tensor, head: Weight, draws: Draws, choices: Tensor, logits: Tensor, operator: Callable[..., None]
    ) -> None:
        if self._choose is None:
            super().choose(hidden, head, draws, choices, logits, operator)
            return
        values, scales = _parts(head)
        hidden = hidden if isinstance(head, Scaled) else hidden.to(head.dtype)
        tile = self._tile(min(len(hidden), _CHOICE_ROWS), head)
        self._choose(hidden, values, scales, draws, choices, tile, pdl=self._pdl)

    def _run(
        self, x: Tensor | Normed, weight: Weight, bias: Tensor | None = None, *, out: Tensor | None = None,
        gated: bool = False, onto: tuple[Tensor, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        x, scaled = (x.unscaled, x[1:]) if isinstance(x, Normed) else (x, None)
        rows, (values, scales) = x.reshape(-1, x.shape[-1]), _parts(weight)
        if out is None:
            out = x.new_empty(*x.shape[:-1], len(weight) // (1 + gated))
        kind = {"gated": gated, "scaled": scaled, "onto": onto, "pdl": self._pdl}
        if len(rows):
            self._launch(rows, values, scales, bias, out, self._tile(len(rows), weight), **kind)
        return out

    def _tile(self, rows: int, weight: Weight) -> Tile:
        columns, inner = weight.shape
        return tile_for(64 if weight.shape in self._one_height else rows, columns, inner, self._shared_bytes)

    def holds(self, name: str, weight: Weight) -> bool:
        """Whether rows have the same bits in products of all heights with a target's weight of that name. Where they
        have not at first, all of its products are made in tiles of 64 rows from then on, and a line says so."""
        if self._equal(name, weight):
            return True
        self._one_height.add(weight.shape)
        problem = "products with weights %s have other bits in other tiles here: all are made in tiles of 64 rows"
        _logger.warning(f"{problem}, which makes passes over few rows slower", list(weight.shape))
        return self._equal(name, weight)

    def _equal(self, name: str, weight: Weight) -> bool:
        """Compare products of three rows again and again, one below the other."""
        three = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        three = three.to(weight.values.device, torch.bfloat16) if isinstance(weight, Scaled) else three.to(weight)
        expected = self._made(name.rpartition(".")[2], weight, three)
        for rows in _CHECKED:
            number = torch.arange(rows, device=three.device) % 3
            found = self._made(name.rpartition(".")[2], weight, three[number])
            if not all(torch.equal(x, y[number]) for x, y in zip(found, expected, strict=True)):
                return False
            if self._choose and name.endswith(_TABLES) and not self._chooses(three[number], weight, found[0]):
                self._choose = None
                _logger.warning("a head's product does not choose the largest of its logits here: they are written")
        return True

    def _made(self, name: str, weight: Weight, x: Tensor) -> list[Tensor]:
        """What passes make of rows x [R, K] with a weight whose name ends so."""
        if name in _TABLES:
            return [self.logits(x, weight)]
        make = partial(self.swiglu, swiglu=F.silu) if name.endswith("gate_up") else self
        made = [make(x, weight)]
        if x.dtype != torch.bfloat16:
            return made
        if name.endswith(("qkv", "gate_up")) and x.shape[1] % _GROUP == 0:
            normed = Normed(x, x.abs().unflatten(-1, (-1, _GROUP)).amax(-1).float(), 1e-6)
            made += make(normed, weight), self(normed, weight, x.new_ones(len(weight)))
        if name in ("o", "down") and len(weight) % _GROUP == 0:
            out, normed = self.add(x, weight, x[:, :1].repeat(1, len(weight)), x.new_ones(len(weight)), 1e-6)
            made += out, normed.unscaled, normed.squares
        return made

    def _chooses(self, hidden: Tensor, head: Weight, logits: Tensor) -> bool:
        """Whether `choose` takes the largest of these logits."""
        choices = torch.empty(len(hidden), 1, dtype=torch.int32, device=hidden.device)
        zeros = torch.zeros(len(hidden), device=hidden.device)
        self.choose(hidden, head, Draws(choices, zeros, zeros.long()), choices, logits, self._launch)
        return torch.equal(choices[:, 0].long(), logits.argmax(-1))


def _parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, Scaled) else (weight, None)


def fixed_order(weights: Mapping[str, Weight], device: torch.device) -> tuple[Products, str | None]:
    """Products in one order for the matrices [N, K] among the weights of a network on a GPU, and None; where they
    cannot be had, PyTorch's or the best there are, and why. Every shape is tried: what one release of Triton compiles
    to equal bits, another may not."""
    matrices = {(name.rpartition(".")[2], *each.shape): each for name, each in weights.items() if each.ndim == 2}
    if odd := [inner for _, _, inner in matrices if inner % _STEP]:
        return PYTORCH, f"of its weights some have {odd[0]} columns, no multiple of {_STEP}"
    try:
        from ddtree_trt.runtime.engines.torch import product_kernel

        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        pdl = (properties.major, properties.minor) >= _PDL_SM
        products = FixedOrder(product_kernel.launch, shared, pdl=pdl, choose=product_kernel.choose)
        unequal = [name for (name, *_), weight in matrices.items() if not products.holds(name, weight)]
    except Exception as error:  # no Triton, one of another API, or no C compiler for it
        _logger.warning("products in one order do not work here (%s): PyTorch makes them", told(error))
        return PYTORCH, f"Triton, which makes its products in one order, does not work here ({told(error)})"
    return products, f"the products of {unequal[0]} have other bits in passes of other sizes" if unequal else None
