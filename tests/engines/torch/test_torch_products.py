"""Products whose rows have the same bits whatever their number, by the kernel's own source, interpreted."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_builds import PACKAGED, build_torch_engine
from numerics import random_tree
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.runtime.engines.base import KERNELS, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch import engine as torch_engine
from ddtree_trt.runtime.engines.torch import products as torch_products
from ddtree_trt.runtime.engines.torch.device_round import HostOps
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.products import PYTORCH, Draws, FixedOrder, Scaled, Tile, fixed_order, tile_for

ROWS = (1, 3, 17, 65, 130)
SHARED_BYTES = 227 << 10  # of an H100
SHAPES = [(4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096), (151936, 4096)]  # of Qwen3-8B


def load_kernel() -> Any:
    """The kernel's module, made anew: interpreted or not, as the environment says."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = Path(torch_products.__file__).with_name("product_kernel.py")
    spec = importlib.util.spec_from_file_location("product_kernel_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Interpreted, with tiles multiplied in rising order of K, as one instruction after the other does: in which order
    NumPy does depends on the machine, and on the tile's height."""

    def matmul(x: Any, y: Any, dtype: Any) -> Any:
        return sum((np.multiply.outer(a, b, dtype=dtype) for a, b in zip(x.T, y, strict=True)), start=0)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(np, "matmul", matmul)
    return load_kernel()


@pytest.fixture
def launch(kernels: Any) -> Callable[..., None]:
    return kernels.launch


@pytest.mark.parametrize(
    ("name", "part", "rows", "columns", "gated", "fp8", "sm"),
    [
        ("_product", "", 64, 151936, False, False, 90),
        ("_product", "normed", 64, 24576, True, True, 90),
        ("_product", "normed", 200, 6144, False, False, 89),
        ("_product", "", 1, 151936, False, True, 89),
        ("_product", "added", 1, 4096, False, False, 80),
        ("_product", "added", 128, 4096, False, False, 90),
        ("_best_of_tiles", "", 64, 151936, False, True, 90),
        ("_best_of_tiles", "", 64, 151936, False, False, 80),
    ],
)
def test_it_compiles_for_gpus(
    name: str, part: str, rows: int, columns: int, gated: bool, fp8: bool, sm: int, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """To machine code. With programmatic dependent launches what comes before the wait are loads of weights alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(load_kernel(), name)
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pdl = sm >= 90
    shared_bytes = SHARED_BYTES if pdl else 99 << 10
    height, width, depth, warps, stages = tile_for(rows, columns, 4096, shared_bytes)
    constants: dict[str, Any] = {"BM": height, "BN": width, "BK": depth, "GATED": gated, "PDL": pdl, "bias": None}
    constants["PIECE"] = 512 if pdl and height <= 64 else 0
    constants |= dict.fromkeys(("onto", "norm", "unscaled", "sums") if part != "added" else ())
    constants |= {"squares": None, "epsilon": 0.0} if part != "normed" else {}
    constants |= {} if fp8 else {"scales": None}
    weight, out = "*fp8e4nv" if fp8 else "*bf16", "*bf16" if gated else "*fp32"
    pointers = {"x": "*bf16", "w": weight, "scales": "*fp32", "out": out, "positions": "*i32", "temperatures": "*fp32"}
    pointers |= {"seeds": "*i64", "values": "*fp64", "ids": "*i32", "squares": "*fp32", "epsilon": "fp32"}
    pointers |= {"onto": "*bf16", "norm": "*bf16", "unscaled": "*bf16", "sums": "*fp32"}
    names = kernel.arg_names
    constants = {each: value for each, value in constants.items() if each in names}
    types = {each: "constexpr" if each in constants else pointers.get(each, "i32") for each in names}
    whole = [each for each in names if types[each] != "constexpr" and each not in {"rows", "tokens", "epsilon"}]
    source = ASTSource(kernel, types, constants, {(names.index(each),): [["tt.divisibility", 16]] for each in whole})
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl}
    made = compile_kernel(source, target=GPUTarget("cuda", sm, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= shared_bytes
    code = made.asm["ptx"]
    assert "cp.async.cg.shared.global" in code and ("wgmma" if rows >= 64 and pdl else "mma.sync") in code
    words = ("prefetch.L2", "griddepcontrol.wait", "griddepcontrol.launch", "cp.async.cg")
    places = [code.find(word) for word in words]
    assert places == sorted(places) and (places[0] > 0) is (height <= 64) if pdl else places[:3] == [-1] * 3


def half(*shape: int, seed: int) -> Tensor:
    """Of type fp16: the interpreter multiplies no bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("columns", "inner", "biased"), [(100, 576, True), (33, 48, False)])
def test_rows_are_those_of_any_number(launch: Callable[..., None], columns: int, inner: int, biased: bool) -> None:
    """Widths that no tile divides, in fp16 and with logits of float32; nothing is written beside the result."""
    products = FixedOrder(launch, SHARED_BYTES, pdl=False)
    x, weight = half(max(ROWS), inner, seed=0), half(columns, inner, seed=1)
    bias = half(columns, seed=2) if biased else None
    exact = x.double() @ weight.double().t()
    whole, logits = products(x, weight, bias), products.logits(x, weight)
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(whole.double(), exact + (0 if bias is None else bias.double()), atol=1e-3, rtol=2**-11)
    for rows in ROWS:
        assert torch.equal(products(x[:rows, None], weight, bias), whole[:rows, None])
        out = torch.full((rows + 1, columns), math.nan)
        assert torch.equal(products.logits(x[:rows], weight, out[:rows]), logits[:rows]) and out[rows:].isnan().all()


@pytest.mark.parametrize(("inner", "columns"), [(48, 100), (16, 130)])
def test_swiglu_is_that_of_the_product(launch: Callable[..., None], inner: int, columns: int) -> None:
    products = FixedOrder(launch, SHARED_BYTES, pdl=False)
    x, weight = half(max(ROWS), inner, seed=3), half(2 * columns, inner, seed=4)
    gates, values = products(x, weight).double().chunk(2, -1)
    whole = products.swiglu(x, weight, F.silu)
    torch.testing.assert_close(whole.double(), F.silu(gates) * values, atol=1e-4, rtol=1.02 * 2**-11)
    for rows in ROWS:
        assert torch.equal(products.swiglu(x[:rows], weight, F.silu), whole[:rows])


@pytest.mark.parametrize(("columns", "inner"), [(100, 64), (34, 48)])
def test_weights_in_fp8(launch: Callable[..., None], columns: int, inner: int) -> None:
    """The nearest values of four bits that e4m3 has, and their products: PyTorch's, in equal bits for all heights."""
    products = FixedOrder(launch, SHARED_BYTES, pdl=False)
    x, weight = half(max(ROWS), inner, seed=8), half(columns, inner, seed=9)
    weight[1] *= 2.0**-9
    weight[2] = 0
    scaled = Scaled.of(weight)
    found = scaled.values.double() * scaled.scales.double()[:, None]
    exact, largest = weight.double(), weight.double().abs().amax(-1, keepdim=True)
    assert ((found - exact).abs() <= 2.0**-4 * exact.abs() + largest * 2.0**-10 / 448).all()
    assert found[2].eq(0).all()
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest, atol=0, rtol=1e-6)
    whole, gated = products(x, scaled), products.swiglu(x, scaled, F.silu)
    torch.testing.assert_close(whole.double(), x.double() @ found.t(), atol=1e-4, rtol=1.02 * 2**-11)
    torch.testing.assert_close(PYTORCH(x, scaled), whole, atol=1e-4, rtol=2**-10)
    gates, values = whole.double().chunk(2, -1)
    torch.testing.assert_close(gated.double(), F.silu(gates) * values, atol=1e-4, rtol=1.02 * 2**-11)
    for rows in ROWS:
        assert torch.equal(products(x[:rows], scaled), whole[:rows])
        assert torch.equal(products.swiglu(x[:rows], scaled, F.silu), gated[:rows])


@pytest.mark.parametrize(("inner", "width", "fp8"), [(48, 160, False), (96, 64, True)])
def test_sums_and_norms_are_made_in_products(launch: Callable[..., None], inner: int, width: int, fp8: bool) -> None:
    """Rows plus a product, and the next product of their norm, gated or not, in equal bits for all heights."""
    products = FixedOrder(launch, SHARED_BYTES, pdl=False)
    x, onto, norm = half(max(ROWS), inner, seed=0), 3 * half(max(ROWS), width, seed=1), half(width, seed=2)
    weight, following = half(width, inner, seed=3), half(2 * 48, width, seed=4)
    back, ahead = (Scaled.of(w) if fp8 else w for w in (weight, following))
    onto[1], x[1] = 0, 0
    total, normed = products.add(x, back, onto, norm, 1e-5)
    torch.testing.assert_close(total.double(), products(x, back).double() + onto.double(), atol=1e-3, rtol=2**-11)
    torch.testing.assert_close(normed.squares.double().sum(-1), total.double().square().sum(-1), atol=0, rtol=1e-6)
    exact = F.rms_norm(total.double(), (width,), norm.double(), 1e-5)
    both, gated = products(normed, ahead), products.swiglu(normed, ahead, F.silu)
    values = ahead.values.double() * ahead.scales.double()[:, None] if isinstance(ahead, Scaled) else ahead.double()
    torch.testing.assert_close(both.double(), exact @ values.t(), atol=2e-2, rtol=2**-9)
    assert both[1].eq(0).all()
    for rows in ROWS:
        fewer, found = products.add(x[:rows, None], back, onto[:rows, None], norm, 1e-5)
        assert all(
            torch.equal(a[:, 0], b[:rows]) for a, b in zip((fewer, *found[:2]), (total, *normed[:2]), strict=True)
        )
        assert torch.equal(products(found, ahead)[:, 0], both[:rows])
        assert torch.equal(products.swiglu(found, ahead, F.silu)[:, 0], gated[:rows])


@pytest.mark.parametrize(("inner", "columns", "fp8"), [(48, 70, False), (64, 100, True)])
def test_tokens_are_chosen_in_the_heads_product(kernels: Any, inner: int, columns: int, fp8: bool) -> None:
    """Those that the host takes of the logits: the first of equal ones, drawn with a temperature, 0 where no logit is a
    number."""
    products = FixedOrder(kernels.launch, SHARED_BYTES, pdl=False, choose=kernels.choose)
    weight = half(columns, inner, seed=6)
    weight[7::10] = weight[17]
    hidden = 3 * half(130, inner, seed=5)
    hidden[3], hidden[4] = 2 * weight[17], math.nan
    head = Scaled.of(weight) if fp8 else weight
    for slots, tokens in ((2, 33), (1, 1), (5, 1)):
        rows, rng = hidden[: slots * tokens], np.random.default_rng(tokens)
        shape, expected = (slots, tokens), torch.zeros(slots, tokens, dtype=torch.int32)
        positions = torch.from_numpy(rng.integers(0, 4000, shape).astype(np.int32))
        draws = Draws(positions, torch.tensor([0, 0.7, 3, 0, 0])[:slots], torch.tensor([0, -5, -(2**63), 1, 2])[:slots])
        logits, choices = products.logits(rows, head), torch.full(shape, -1, dtype=torch.int32)
        HostOps().choose(logits.nan_to_num(-math.inf).unflatten(0, shape), *draws, expected)
        products.choose(rows, head, draws, choices, logits[:0], HostOps().choose)
        assert torch.equal(choices, expected)
    assert choices[3:, 0].tolist() == [7, 0]
    assert products.holds("target.head", head) and products._choose is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES, 99 << 10])
def test_tiles_fit(shape: tuple[int, int], shared_bytes: int) -> None:
    for rows in (*range(1, 130, 8), 2048):
        tile = tile_for(rows, *shape, shared_bytes)
        assert tile.height >= min(rows, 128) and shape[1] % tile.depth == 0
        assert 2 * tile.stages * tile.depth * (tile.height + tile.width) <= shared_bytes
    assert tile_for(1, 6144, 4096, SHARED_BYTES) == Tile(16, 32, 128, 4, 5)  # as measured
    assert tile_for(64, 151936, 4096, SHARED_BYTES) == Tile(64, 128, 128, 8, 3)


def by_pytorch(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out: Tensor, tile: Tile, **kind: Any
) -> None:
    """In the kernel's place, row by row, so that the bits do not depend on their number."""
    matrix = weight if scales is None else Scaled(weight, scales)
    if kind["scaled"] is not None:
        squares, epsilon = kind["scaled"]
        x = (x * (squares.sum(-1) / x.shape[-1] + epsilon).rsqrt().view(-1, 1)).to(x.dtype)
    found = torch.cat([PYTORCH(row[None], matrix, bias) for row in x])
    if kind["gated"]:
        gates, values = found.chunk(2, -1)
        found = F.silu(gates) * values
    if kind["onto"] is not None:
        onto, norm, unscaled, squares = kind["onto"]
        found = found + onto.view(found.shape)
        unscaled.view(found.shape).copy_(found * norm)
        squares.copy_(found.float().square().view(*squares.shape, 32).sum(-1))
    out.view(found.shape).copy_(found)


def other_bits(*heights: int) -> Callable[..., None]:
    """The same, but for tiles of these heights in other bits."""

    def launch(x: Tensor, weight: Tensor, scales: Any, bias: Any, out: Tensor, tile: Tile, **kind: Any) -> None:
        by_pytorch(x, weight, scales, bias, out, tile, **kind)
        if tile.height in heights:
            out[len(x) // 2].nextafter_(torch.tensor(math.inf))

    return launch


def test_tiles_with_other_bits_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """And replaced by that of 64 rows, if that is enough."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(7)).bfloat16()
    for name in ("o", "target.layers.0.gate_up", "qkv", "target.head"):
        assert FixedOrder(by_pytorch, SHARED_BYTES, pdl=False).holds(name, weight)
        for height in (16, 128):
            caplog.clear()
            products = FixedOrder(other_bits(height), SHARED_BYTES, pdl=False)
            assert products.holds(name, weight) and "tiles of 64 rows" in caplog.text
            assert torch.equal(products(weight[:5, :32], weight), by_rows(weight[:5, :32], weight))
        assert not FixedOrder(other_bits(64), SHARED_BYTES, pdl=False).holds(name, weight)
    products = FixedOrder(by_pytorch, SHARED_BYTES, pdl=False, choose=lambda *args, **_: args[4].zero_())
    assert products.holds(name, weight) and products._choose is None and "they are written" in caplog.text


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([F.linear(row[None], weight) for row in x])


def test_where_the_kernel_does_not_work_pytorch_makes_products(caplog: pytest.LogCaptureFixture) -> None:
    """As here, on a CPU."""
    products, reason = fixed_order({"target.layers.0.o": torch.ones(32, 32)}, torch.device("cpu"))
    assert type(products) is torch_products.Products and reason is not None and "Triton" in reason
    assert "PyTorch makes them" in caplog.text
    _, reason = fixed_order({"target.layers.0.o": torch.ones(32, 24)}, torch.device("cpu"))
    assert reason is not None and "24 columns, no multiple of 16" in reason


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("bf16", 0.3)])
def test_an_engine_makes_all_products_of_its_target_by_them(
    precision: str, near: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU: with sums and norms in them in bf16, at the weights of the engine as it is on a CPU."""
    used: dict[int, int] = {}  # address of a weight → products with it onto rows

    def launch(x: Tensor, weight: Tensor, scales: Any, bias: Any, out: Tensor, tile: Tile, **kind: Any) -> None:
        used[weight.data_ptr()] = used.get(weight.data_ptr(), 0) + (kind["onto"] is not None)
        by_pytorch(x, weight, scales, bias, out, tile, **kind)

    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision=precision).close()
    products = FixedOrder(launch, SHARED_BYTES, pdl=False)
    rng, found = np.random.default_rng(0), []
    tree, prompt = random_tree(rng, 20, 2048), rng.integers(5, 2048, 30)
    for reason in (KERNELS, None):
        if reason is None:
            monkeypatch.setattr(torch_engine, "why_inexact", lambda *_, **__: None)
            monkeypatch.setattr(torch_engine, "fixed_order", lambda *_: (products, None))
        engine = open_engine(tmp_path / "e", threads=1)
        assert isinstance(engine, TorchEngine) and engine.inexact == reason
        engine.prefill(0, prompt, rows="none", taps=True)
        (verdict,) = engine.verify([VerifyRequest(0, tree)])
        _, states = engine.target.commit(0, np.arange(1, dtype=np.int32))
        assert states is not None
        found.append((np.asarray(verdict.logits), states.float().numpy()))
        network = engine.target.network
        layers = network._decoder.layers
        matrices = {w.data_ptr() for each in layers for w in vars(each).values() if w is not None and w.ndim == 2}
        onto = {w.data_ptr() for each in layers for w in (each.o, each.down)}
        assert isinstance(network.head, Tensor)
        head = network.head.data_ptr()
        engine.close()
    for plain, fixed in zip(*found, strict=True):
        np.testing.assert_allclose(fixed, plain, atol=near)
    assert used.keys() == {head, *matrices}
    assert {address for address, count in used.items() if count} == (onto if precision == "bf16" else set())
