"""Checks of the PyTorch engine on one device or two, for `bench.py`: the packaged pair against float32 on the CPU."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

import ddtree_trt
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.engines.base import Engine, RoundRequest, VerifyRequest
from ddtree_trt.runtime.engines.torch.attention import load_operators
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.engines.torch.pointwise import Pointwise, rotary_tables
from ddtree_trt.runtime.engines.torch.products import PYTORCH, Products, fixed_order
from ddtree_trt.runtime.engines.torch.weights import DTYPES, read_weights
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.tree import TokenTree
from tools.gpu.rounds import HostRounds, fill
from workbench.random_pair import find_shape

TINY = Path(ddtree_trt.__file__).parent / "assets" / "tiny"
RELATIVE_ERROR = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 1.5e-1}  # of logits, in units of their root mean square
# Two logits this near, relative to the row's largest, may change places between a pass of one token and one of many.
NEAR_TIE = {"fp32": 2.0**-10, "fp16": 2.0**-8, "bf16": 2.0**-5}
BUDGETS = (4, 16, 64)


def open_tiny(folder: Path, precision: Any, device: torch.device) -> TorchEngine:
    """The packaged pair on a device, built in `folder` if need be."""
    directory = folder / f"tiny-{precision}"
    if not directory.exists():
        request = BuildRequest(
            target="tiny", backend="torch", precision=precision, output=directory, max_batch=2, max_seq_len=512
        )
        compile_engine(request)
    manifest = load_manifest(directory)
    return TorchEngine(manifest, read_weights(directory, manifest, device), device)


def check(
    folder: Path, precision: str, device: torch.device, count: int, tokens: int, ranks: int = 1
) -> dict[str, Any]:
    """Compare logits of branching trees with float32, and `tokens` tokens after `count` prompts, decoded by every
    method, with those decoded one by one in one process; with `ranks`, of a target that is split over so many devices.
    Raises AssertionError that says what differs."""
    truth, one = open_tiny(folder, "fp32", torch.device("cpu")), open_tiny(folder, precision, device)
    directory, engine = folder / f"tiny-{precision}", cast(Engine, one)
    if ranks > 1:
        engine = ParallelEngine.open(directory, load_manifest(directory), EngineOptions(tensor_parallel_size=ranks))
    try:
        error = compare_trees(truth, engine)
        assert error <= RELATIVE_ERROR[precision], f"logits are off by {error:.3g} of their scale"
        outputs, ties = 0, 0
        for prompt in prompts(count):
            expected = HostRounds(one, budget=0).decode(fill(one, prompt), tokens)[:tokens]
            for name, decode in decoders(engine).items():
                found = decode(fill(engine, prompt), tokens)[:tokens]
                outputs += 1
                differs = differ_at_a_tie(truth, prompt, expected, found, precision, name)
                assert not (differs and engine.inexact is None), f"{name} parts from ar in an exact engine"
                ties += differs
        return {"relative_error": error, "kernels": one.target.kernels, "outputs": outputs, "differ_at_a_tie": ties}
    finally:
        engine.close()


def check_pointwise(device: torch.device) -> dict[str, float]:
    """Largest errors of the kernels between matrix products at an 8B model's widths, in half steps of the precision.
    Raises AssertionError where one is above what a single rounding explains."""
    load_operators()
    dims = find_shape("qwen3-8b").target
    eps, heads = dims.rms_norm_eps, dims.num_heads
    tables = rotary_tables(dims, 1000, device)
    errors: dict[str, float] = {}
    for precision, half_step in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        dtype = DTYPES[precision]

        def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        x, update, weight = normal(2, 33, dims.hidden_size), normal(2, 33, dims.hidden_size), normal(dims.hidden_size)
        qkv, norm = normal(2, 33, (heads + 2 * dims.num_kv_heads) * dims.head_dim), normal(dims.head_dim)
        gate_up = normal(2, 33, 2 * dims.intermediate_size)
        positions = torch.arange(66, dtype=torch.int32, device=device).view(2, 33) * 15
        total, normed = Pointwise(kernels=True).add_norm(x, update, weight, eps)
        exact = [x.double() + update.double(), Pointwise().add_norm(total.double(), None, weight.double(), eps)[1]]
        found, each = [total, normed], (heads, dims.num_kv_heads)
        found += Pointwise(kernels=True).split_qkv(qkv, norm, norm, tables, positions, eps, each)
        wide, wide_norm = qkv.double(), norm.double()
        exact += Pointwise().split_qkv(wide, wide_norm, wide_norm, tables.double(), positions, eps, each)
        found.append(Pointwise(kernels=True).swiglu(gate_up))
        exact.append(Pointwise().swiglu(gate_up.double()))
        for name, a, b in zip(("sum", "norm", "q", "k", "v", "swiglu"), found, exact, strict=True):
            # Against the value, and where two terms cancel against the size of the terms.
            error = float(((a.double() - b).abs() / (half_step * b.abs() + 1e-3 * half_step + 1e-5)).max())
            errors[f"{name} {precision}"] = error
            assert error <= 1.1, f"{name} in {precision} is off by {error:.2f} half steps"
    return errors


def check_products(device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of the products of an 8B target in bf16 over 1 to 1024 rows, PyTorch's first, weights not in L2.
    Raises AssertionError where rows have other bits in products of other heights, or one is off."""
    dims, found = find_shape("qwen3-8b").target, {}
    hidden, inner, query = dims.hidden_size, dims.intermediate_size, dims.num_heads * dims.head_dim
    shapes = {"qkv": (sum(dims.qkv_widths), hidden), "o": (hidden, query), "gate_up": (2 * inner, hidden)}
    shapes |= {"down": (hidden, inner), "head": dims.table}
    for name, shape in shapes.items():
        copies = [
            torch.randn(shape, device=device).bfloat16() for _ in range(-(-(256 << 20) // (2 * math.prod(shape))))
        ]
        products, reason = fixed_order({f"target.{name}": copies[0]}, device)
        assert reason is None, reason
        x = torch.randn(1024, shape[1], device=device).bfloat16()
        exact = F.linear(x[:3].float(), copies[0].float())
        torch.testing.assert_close(
            products(x[:3], copies[0]).float(), exact, rtol=2.0**-8, atol=2.0**-8 * shape[1] ** 0.5
        )
        for rows in (1, 64, 128, 1024):
            for maker in (PYTORCH, products):
                work = partial(_make, maker, name, x[:rows], copies)
                found[f"{name}, {rows} rows, {'PyTorch' if maker is PYTORCH else 'fixed order'}"] = _time(
                    work, len(copies)
                )
    return {"us": found}


def _make(products: Products, name: str, x: torch.Tensor, copies: list[torch.Tensor]) -> None:
    for weight in copies:
        if name == "head":
            products.logits(x, weight)
        elif name == "gate_up":
            products.swiglu(x[None], weight, Pointwise(kernels=True).swiglu)
        else:
            products(x, weight)


def _time(work: Callable[[], None], count: int) -> float:
    """Microseconds of one of the `count` kernels that `work` launches, captured into a graph."""
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return round(1e3 * start.elapsed_time(end) / (20 * count), 2)


def compare_trees(truth: TorchEngine, engine: Engine) -> float:
    """Largest error of logits, over their root mean square, of two slots of a pass and three rounds that move rows."""
    rng, worst = np.random.default_rng(0), 0.0
    vocab = truth.manifest.target_dims.vocab_size
    engines: tuple[Engine, ...] = (truth, engine)
    for e in engines:
        for slot, length in enumerate((7, 300)):
            tokens = np.random.default_rng(slot).integers(5, vocab, length)
            for start in range(0, length, 256):
                e.prefill(slot, tokens[start : start + 256], rows="none", taps=True)
    for sizes in ((10, 65), (33, 2), (5, 40)):
        trees = [random_tree(rng, size, vocab) for size in sizes]
        logits = [
            [np.asarray(v.logits) for v in e.verify([VerifyRequest(s, t) for s, t in enumerate(trees)])]
            for e in engines
        ]
        for expected, found in zip(*logits, strict=True):
            worst = max(worst, float(np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected)))))
        for e in engines:
            for slot, tree in enumerate(trees):
                path = [len(tree) - 1]
                while tree.parents[path[-1]] >= 0:
                    path.append(int(tree.parents[path[-1]]))
                e.commit(slot, np.array(path[::-1], np.int32), taps=True)
    for e in engines:
        e.truncate(1, 0)
    return worst


def random_tree(rng: np.random.Generator, size: int, vocab: int) -> TokenTree:
    parents = np.array([-1, *(rng.integers(0, i) for i in range(1, size))], np.int32)
    depths = np.zeros(size, np.int32)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(rng.integers(5, vocab, size), parents, depths)


def decoders(engine: Engine) -> dict[str, Any]:
    """Functions of the bonus token and a number of tokens that decode, by name."""
    block = engine.manifest.drafting.dims.block_size
    found: dict[str, Any] = {"dflash": HostRounds(engine, budget=block - 1, dflash=True).decode}
    for budget in BUDGETS:
        found[f"host-{budget}"] = HostRounds(engine, budget=budget).decode
        if engine.rounds is not None:
            found[f"device-{budget}"] = partial(decode_on_device, engine, budget)
    return found


def decode_on_device(engine: Engine, budget: int, bonus: int, tokens: int) -> list[int]:
    """At least so many tokens by rounds that stay on the device, the bonus token first."""
    assert engine.rounds is not None, "asked where the device does rounds"
    output = [bonus]
    while len(output) < tokens:
        engine.rounds.launch([RoundRequest(0, output[-1], budget)])
        output += engine.rounds.read().results[0].tokens
    return output


def differ_at_a_tie(
    truth: TorchEngine, prompt: np.ndarray, expected: list[int], found: list[int], precision: str, name: str
) -> bool:
    """Whether the outputs differ, which they may where the target's two best logits are closer than rounding. Raises
    AssertionError where they are not."""
    if found == expected:
        return False
    assert len(found) == len(expected), f"{name}: {len(found)} tokens instead of {len(expected)}"
    place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    fill(truth, np.concatenate((prompt, expected[:place])).astype(np.int64))
    truth.truncate(0, truth.length(0) - 1)
    last = expected[place - 1] if place else int(prompt[-1])
    row = truth.prefill(0, np.array([last], np.int64), rows="last", taps=False).logits[-1]
    gap = float(row.max() - min(row[expected[place]], row[found[place]]))
    allowed = NEAR_TIE[precision] * float(np.abs(row).max())
    assert gap <= allowed, (
        f"{name} parts at token {place}, where {gap:.3g} lies between the two, more than {allowed:.3g}"
    )
    return True


def prompts(count: int) -> list[np.ndarray]:
    """The shortest packaged prompts as token ids of their bytes, since their text does not matter here."""
    rows = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = sorted((json.loads(row)["prompt"] for row in rows), key=len)[:count]
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) + 5 for text in texts]
