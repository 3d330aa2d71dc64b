"""`DDTreeAttention` in ONNX Runtime against NumPy in float64, and what it promises beyond: a row's result is a function
of the positions it sees, so that trees, chains, single tokens, batches and threads give the same bits.

`DDTREE_CPU_ISA` chooses the instruction set when the library is loaded; the last test runs this file with the others.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain as joined
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from delta_truth import path_to
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ddtree_trt import _native
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.onnxruntime.network import session_options

Floats = NDArray[np.float32]
Rows = list[tuple[int, int, int, int, int]]  # slot, past, contexts, done, nodes
TOLERANCE = {False: 2e-5, True: 4e-2}
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 56)]
TYPES = {"query": 1, "key": 1, "value": 1, "cos": 1, "sin": 1, "slots": 7, "parents": 6, "cache": 2}


@dataclass
class Layer:
    """One layer's attention and the cache of its slots."""

    kv_heads: int
    heads: int
    size: int
    rows: int
    half: bool = False
    slots: int = 3
    threads: int = 1
    mode: MaskMode = MaskMode.TREE
    window: int = 0

    def __post_init__(self) -> None:
        self.shape = self.size, self.rows, self.half
        self.cache = np.zeros((2, self.slots, self.kv_heads, head_bytes(*self.shape)), np.uint8)  # of two layers
        angles = np.outer(np.arange(self.rows), 1e4 ** (-np.arange(self.size // 2) / (self.size // 2)))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        attributes: dict[str, Any] = {
            "num_q_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.size, "mask_mode": self.mode,
            "window": self.window, "layer": 1, "rows": self.rows, "half": int(self.half),
        }  # fmt: skip
        node = helper.make_node("DDTreeAttention", [*TYPES], ["out"], None, None, "ddtree", **attributes)
        ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in TYPES.items()]
        graph = helper.make_graph([node], "g", ends, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ddtree", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        self._session = ort.InferenceSession(model.SerializeToString(), session_options(self.threads))

    def run(self, rows: Rows, parents: list[int], q: Floats, k: Floats, v: Floats) -> Floats:
        flat = {name: x.reshape(1, len(x), -1) for name, x in (("query", q), ("key", k), ("value", v))}
        feed = {**flat, "cos": self.cos, "sin": self.sin, "slots": np.array(rows, np.int64)}
        feed |= {"parents": np.array(parents, np.int32), "cache": self.cache}
        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
        binding.bind_output("out")
        self._session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0].reshape(-1, self.heads, self.size)

    def rotated(self, x: Floats, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        a, b = np.split(x.astype(float), 2, axis=-1)
        cos, sin = (table[positions].astype(float)[:, None] for table in (self.cos, self.sin))
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def truth(self, q: Floats, own: Any, k: Floats, v: Floats, positions: Any, sees: Any) -> NDArray[np.float64]:
        """Attention of queries at positions `own` over all keys at `positions`, of which `sees` [T, S] are visible."""
        queries, keys = self.rotated(q, own) / np.sqrt(self.size), self.rotated(k, positions)
        out = np.empty_like(queries)
        for head in range(self.heads):
            of = head * self.kv_heads // self.heads
            scores = np.where(sees, queries[:, head] @ keys[:, of].T, -np.inf)
            shares = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = shares / shares.sum(1, keepdims=True) @ v[:, of].astype(float)
        return out


def head_bytes(size: int, rows: int, half: bool) -> int:
    """Keys and values of a head; of bfloat16 pairs of elements, and of rows."""
    padded = -(-size // 16) * 16
    return rows * ((size + 1) // 2 * 4 + 2 * padded if half else 4 * (size + padded))


def random_tree(rng: np.random.Generator, size: int, *, roots: bool = False) -> list[int]:
    return [-1, *(int(rng.integers(-1 if roots else max(0, i - 6), i)) for i in range(1, size))]


def chain(size: int) -> list[int]:
    return list(range(-1, size - 1))


@pytest.mark.parametrize("seed", [*range(16), *SLOW])
def test_trees_of_several_slots(seed: int) -> None:
    """Against NumPy; and a path alone, its nodes one by one, and what a commit of it leaves have the same bits."""
    rng, half, longest = np.random.default_rng(seed), seed % 2 == 1, 1200 if seed < 16 else 8192
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3, 5, 8]))
    size, rows = int(rng.choice([32, 64, 80, 96, 128, 256])), int(rng.choice([192, 640, longest + 192]) // 64 * 64)
    layer = Layer(kv_heads, kv_heads * group, size, rows, half, threads=1 + seed % 4)

    def made(count: int, heads: int) -> Floats:
        return rng.standard_normal((count, heads, size)).astype(np.float32)

    pasts = [int(rng.choice([0, 1, 63, 64, 65, 511, 512, 513, int(rng.integers(0, longest))])) for _ in range(3)]
    pasts = [min(past, rows - 135) for past in pasts]
    keys, values = ([made(past, kv_heads) for past in pasts] for _ in range(2))
    for slot, past in enumerate(pasts):
        done = 0
        while done < past:  # chunks of a prefill
            count = min(int(rng.integers(1, 200)), past - done)
            q, part = made(count, layer.heads), slice(done, done + count)
            found = layer.run([(slot, done, 0, 0, count)], chain(count), q, keys[slot][part], values[slot][part])
            at, end = np.arange(done, done + count), done + count
            sees = np.arange(end) <= at[:, None]
            expected = layer.truth(q, at, keys[slot][:end], values[slot][:end], np.arange(end), sees)
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[half])
            done = end
    trees = [random_tree(rng, int(rng.integers(1, rng.choice([42, 130])))) for _ in pasts]
    starts = np.cumsum([0, *map(len, trees)])
    q, k, v = made(starts[-1], layer.heads), made(starts[-1], kv_heads), made(starts[-1], kv_heads)
    before = layer.cache.copy()
    together: Rows = [(slot, past, 0, 0, len(tree)) for slot, (past, tree) in enumerate(zip(pasts, trees, strict=True))]
    found = layer.run(together, [*joined(*trees)], q, k, v)
    after = layer.cache.copy()
    for slot, (past, tree, start) in enumerate(zip(pasts, trees, starts, strict=False)):
        own = slice(start, start + len(tree))
        paths = [path_to(tree, node) for node in range(len(tree))]
        depths = np.array([len(path) - 1 for path in paths])
        ancestors = np.array([np.isin(np.arange(len(tree)), path) for path in paths])
        sees = np.concatenate([np.ones((len(tree), past), bool), ancestors], axis=1)
        positions = np.concatenate([np.arange(past), past + depths])
        all_k, all_v = (np.concatenate([old[slot], new[own]]) for old, new in ((keys, k), (values, v)))
        expected = layer.truth(q[own], past + depths, all_k, all_v, positions, sees)
        np.testing.assert_allclose(found[own], expected, rtol=0, atol=TOLERANCE[half])

        path = paths[int(rng.integers(len(tree)))]
        rows_of = [start + node for node in path]
        layer.cache[:] = before
        alone = layer.run([(slot, past, 0, 0, len(path))], chain(len(path)), q[rows_of], k[rows_of], v[rows_of])
        np.testing.assert_array_equal(alone, found[rows_of])
        straight = layer.cache.copy()
        layer.cache[:] = before
        for i, row in enumerate(rows_of):
            one = layer.run([(slot, past + i, 0, 0, 1)], [-1], q[row : row + 1], k[row : row + 1], v[row : row + 1])
            np.testing.assert_array_equal(one[0], found[row])
        following = []
        for cache in (straight, after):
            layer.cache[:] = cache
            if cache is after:
                _native.compact_cache(layer.cache, slot, *layer.shape, past, np.array(path, np.int32))
            following.append(layer.run([(slot, past + len(path), 0, 0, 1)], [-1], q[:1], k[:1], v[:1]))
        np.testing.assert_array_equal(following[0], following[1])


@pytest.mark.parametrize("seed", [*range(8), *SLOW])
def test_blocks_behind_contexts(seed: int) -> None:
    """Of a block drafter: contexts have keys alone; a block's rows see it whole, or what is before, in windows."""
    rng, half = np.random.default_rng(seed), seed % 2 == 1
    mode, window = (MaskMode.CAUSAL, MaskMode.NONE)[seed // 2 % 2], (0, 5, 70, 200)[seed % 4]
    size, heads = int(rng.choice([32, 64, 80, 96, 128, 256])), 2 * int(rng.choice([1, 2, 3, 5, 8]))
    layer = Layer(2, heads, size, 640, half, threads=2, mode=mode, window=window)
    pasts, block = [0, 0, 0], int(rng.integers(1, 17))
    held = [[np.empty((0, 2, size), np.float32)] * 2 for _ in pasts]
    for _ in range(4):
        contexts = [int(rng.integers(1, 120)) for _ in pasts]
        q, k, v = (rng.standard_normal((sum(contexts) + 3 * block, n, size)).astype(np.float32) for n in (heads, 2, 2))
        rows: Rows = [(slot, pasts[slot], contexts[slot], 0, block) for slot in range(3)]
        found = layer.run(rows, [], q, k, v)
        first = 0
        for slot, count in enumerate(contexts):
            part = slice(first, first + count)
            held[slot] = [np.concatenate([old, new[part]]) for old, new in zip(held[slot], (k, v), strict=True)]
            own = slice(sum(contexts) + slot * block, sum(contexts) + (slot + 1) * block)
            pasts[slot], first = pasts[slot] + count, first + count
            positions, at = np.arange(pasts[slot] + block), pasts[slot] + np.arange(block)
            away = at[:, None] - positions
            sees = (away >= 0 if mode is MaskMode.CAUSAL else away == away) & (np.abs(away) < (window or 10**6))
            all_k, all_v = (np.concatenate([old, new[own]]) for old, new in zip(held[slot], (k, v), strict=True))
            expected = layer.truth(q[own], at, all_k, all_v, positions, sees)
            np.testing.assert_allclose(found[slot * block : (slot + 1) * block], expected, rtol=0, atol=TOLERANCE[half])


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_level_by_level(seed: int) -> None:
    """Nodes whose rows the cache has are not computed again; a forest may have several roots."""
    rng = np.random.default_rng(seed)
    layer, size = Layer(2, 4, 32, 256), int(rng.integers(2, 40))
    past, parents = int(rng.integers(0, 100)), random_tree(rng, size, roots=True)
    q, k, v = (rng.standard_normal((past + size, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    if past:
        layer.run([(1, 0, 0, 0, past)], chain(past), q[:past], k[:past], v[:past])
    q, k, v = q[past:], k[past:], v[past:]
    whole = layer.run([(1, past, 0, 0, size)], parents, q, k, v)
    cuts = sorted({0, size, *rng.integers(1, size, 3).tolist()})
    levels = [layer.run([(1, past, 0, a, b - a)], parents[:b], q[a:b], k[a:b], v[a:b]) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(levels), whole)


@pytest.mark.parametrize(
    ("rows", "parents", "message"),
    [
        ([(0, 100, 0, 0, 29)], chain(29), "rows of slot 0 do not fit its cache"),
        ([(3, 0, 0, 0, 2)], chain(2), "rows of slot 3 do not fit its cache"),
        ([(0, 0, 0, 0, 3)], [-1, 0], "parents are not those of trees"),
        ([(0, 0, 0, 0, 2)], [-1, 1], "parents are not those of trees"),
        ([(0, 0, 0, 0, 30)], chain(30), "the slots have more rows than the pass"),
    ],
)
def test_what_would_write_outside_of_the_cache_is_refused(rows: Rows, parents: list[int], message: str) -> None:
    layer = Layer(1, 1, 32, 128)
    x = np.ones((29, 1, 32), np.float32)
    with pytest.raises(Exception, match=message):
        layer.run(rows, parents, x, x, x)
    assert not layer.cache.any()


GOOD: dict[str, Any] = {"slot": 1, "head_dim": 32, "rows": 128, "half": False, "start": 4}
GOOD |= {"cache": np.zeros((2, 3, 1, head_bytes(32, 128, False)), np.uint8), "keep": np.array([0, 2], np.int32)}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"keep": np.array([2, 2], np.int32)}, ValueError, r"keep\[1\] is 2"),
        ({"keep": np.array([-1, 1], np.int32)}, ValueError, r"keep\[0\] is -1"),
        ({"keep": np.array([0, 124], np.int32)}, ValueError, r"keep\[1\] is 124"),
        ({"keep": np.array([0, 1])}, TypeError, "keep must have dtype int32"),
        ({"start": -1}, ValueError, "start"),
        ({"start": 2**63 - 1, "keep": np.array([1], np.int32)}, ValueError, r"keep\[0\] is 1"),
        ({"slot": 3}, ValueError, "slot"),
        ({"rows": 129}, ValueError, "multiple of 64"),
        ({"head_dim": 0}, ValueError, "positive"),
        ({"cache": np.zeros((2, 3, 1, 4), np.uint8)}, ValueError, "bytes a head"),
    ],
)
def test_compaction_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _native.compact_cache(**{**GOOD, **change})
    assert not GOOD["cache"].any()


@pytest.mark.parametrize("isa", ["avx512-bf16", "avx512-vnni", "avx512", "avx2", "plain"])
def test_other_instruction_sets(isa: str) -> None:
    """Of attention, of delta nets, and of products with 8-bit integers."""
    if os.environ.get("DDTREE_CPU_ISA") or _native.attention_isa() == "plain":
        pytest.skip("this run has one instruction set")
    names = ("test_trees_of_several_slots", "test_blocks_behind_contexts")
    tests = [f"{__file__}::{name}[{seed}]" for name in names for seed in (0, 3, 6)]
    tests += [str(Path(__file__).with_name(f"test_cpu_{name}.py")) for name in ("delta", "products")]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env={**os.environ, "DDTREE_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
