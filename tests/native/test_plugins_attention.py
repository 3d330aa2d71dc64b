"""Tree attention: the CUDA source, run on the CPU, against the NumPy reference.

The emulation follows the fragment layouts of the PTX manual, lands asynchronous copies at unknown moments and shuffles
threads between barriers. Machine code, memory ordering and speed are for cpp_plugins/tests/run_gpu.sh.
"""

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import kernel_reference as reference
import numpy as np
import pytest
from ml_dtypes import bfloat16
from plugin_libraries import Guarded, aligned, check_in_child, emulated_kernels

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.plugins import MaskMode

POISON = 0x7FFF  # NaN in bf16 and fp16 alike


def encode(values: np.ndarray, fp16: bool) -> np.ndarray:
    """uint16 bits of bf16 or fp16, rounded to nearest even."""
    return values.astype(np.float16 if fp16 else bfloat16).view(np.uint16)


def decode(bits: np.ndarray, fp16: bool) -> np.ndarray:
    return bits.view(np.float16 if fp16 else bfloat16).astype(np.float32)


Tree = Callable[[np.random.Generator, int], np.ndarray]
Place = Callable[[np.ndarray], np.ndarray]


class Case:
    """Random tensors of one call. Cache rows at and after past_len are NaN: reading one shows."""

    def __init__(
        self, tokens: int, past: Sequence[int] | np.ndarray, group: int = 1, kv_heads: int = 1, head_dim: int = 64,
        fp16: bool = False, tree: Tree = reference.random_parents, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.fp16 = fp16
        self.past_len = np.array(past, np.int32)
        n = len(self.past_len)
        slots = n + 1
        capacity = max(int(self.past_len.max()), 0) + tokens + 3
        shapes = {
            "q": (n, tokens, kv_heads * group, head_dim),
            "k": (n, tokens, kv_heads, head_dim),
            "v": (n, tokens, kv_heads, head_dim),
            "cache_k": (slots, kv_heads, capacity, head_dim),
            "cache_v": (slots, kv_heads, capacity, head_dim),
        }
        self.arrays = {name: aligned(shape, np.uint16) for name, shape in shapes.items()}
        for array in self.arrays.values():
            array[...] = encode(rng.standard_normal(array.shape, np.float32), fp16)
        self.slot_ids = rng.permutation(slots)[:n].astype(np.int32)
        for name in ("cache_k", "cache_v"):
            for slot, length in zip(self.slot_ids, self.past_len, strict=True):
                self.arrays[name][slot, :, max(length, 0) :] = POISON
        self.tree_mask = np.stack([reference.packed_mask(tree(rng, tokens)) for _ in range(n)])
        self.seen = np.bitwise_count(self.tree_mask.view(np.uint32)).sum(2)  # new tokens, by each
        self.scale = head_dim**-0.5

    def expected(self, mode: MaskMode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = {name: decode(array, self.fp16) for name, array in self.arrays.items()}
        return reference.attention(
            values["q"], values["k"], values["v"], values["cache_k"], values["cache_v"],
            self.slot_ids, self.past_len, self.tree_mask, mode, self.scale,
        )  # fmt: skip

    def fields(self, mode: MaskMode, splits: int = 0, **change: Any) -> dict[str, Any]:
        a = self.arrays
        slots, kv_heads, capacity, head_dim = a["cache_k"].shape
        fields = {
            **{name: a[name] for name in "qkv"}, "past_k": a["cache_k"], "past_v": a["cache_v"],
            "present_k": a["cache_k"], "present_v": a["cache_v"], "slot_ids": self.slot_ids, "past_len": self.past_len,
            "tree_mask": self.tree_mask, "sequences": len(self.past_len), "tokens": a["q"].shape[1],
            "q_heads": a["q"].shape[2], "kv_heads": kv_heads, "head_dim": head_dim, "slots": slots,
            "capacity": capacity, "mask_words": self.tree_mask.shape[2], "type": int(self.fp16),
            "mask_mode": int(mode), "scale": self.scale, "splits": splits,
        }  # fmt: skip
        return fields | change

    def run(self, mode: MaskMode, splits: int = 0, place: Place = lambda array: array) -> np.ndarray:
        fields = self.fields(mode, splits)
        size = emulated_kernels().attention_workspace_bytes(**fields)
        workspace, out = aligned((size // 2,), np.uint16), aligned(self.arrays["q"].shape, np.uint16)
        workspace[...] = out[...] = POISON
        workspace, out = place(workspace), place(out)
        emulated_kernels().launch("tree_attention", out=out, workspace=workspace, workspace_bytes=size, **fields)
        self.workspace = workspace.view(np.float32)
        return decode(out, self.fp16)

    def sums(self, n: int, token: int) -> np.ndarray:
        """The last run's float32 sums [Hq, D + 1] of a row of modes TREE and CAUSAL before they are rounded, the sum of
        weights last: its parts folded as the kernels fold them."""
        _, tokens, q_heads, dim = self.arrays["q"].shape
        heads = self.arrays["k"].shape[2]
        group = q_heads // heads
        rows = tokens * group
        parts = self.workspace.size // (len(self.past_len) * heads * rows * (dim + 2))
        shape = (len(self.past_len), heads, parts, rows)
        out = self.workspace[: np.prod(shape) * dim].reshape(*shape, dim)[n, :, :, token * group :][:, :, :group]
        sums = self.workspace[np.prod(shape) * dim :].reshape(*shape, 2)[n, :, :, token * group :][:, :, :group]
        seen = int(self.seen[n, token])
        end = max(0, (int(self.past_len[n]) + seen - 1 - 16) // 64 * 64)
        head_parts = min(-(-end // 256), parts - 1)
        found = np.zeros((heads, group, dim + 1), np.float32)
        for head, member in np.ndindex(heads, group):
            largest, x = -np.inf, np.zeros(dim + 1)
            for part in [*range(head_parts), parts - 1]:
                top, total = (float(value) for value in sums[head, part, member])
                most = max(largest, top)
                before, added = _exp2f(largest - most), _exp2f(top - most)
                values = np.append(out[head, part, member], np.float32(total)).astype(np.float64)
                x = (values * added + (x * before).astype(np.float32)).astype(np.float32).astype(np.float64)
                largest = most
            found[head, member] = x
        return found.reshape(q_heads, dim + 1)


_exp2f = ctypes.CDLL(ctypes.util.find_library("m")).exp2f
_exp2f.restype, _exp2f.argtypes = ctypes.c_float, (ctypes.c_float,)


def check(case: Case, mode: MaskMode, splits: int = 0) -> None:
    attn, present_k, present_v = case.expected(mode)
    found = case.run(mode, splits)
    assert np.isfinite(found).all()
    assert np.abs(found - attn).max() <= 2e-2
    assert np.linalg.norm(found - attn) <= (2e-3 if case.fp16 else 1e-2) * np.linalg.norm(attn)
    np.testing.assert_array_equal(decode(case.arrays["cache_k"], case.fp16), present_k)
    np.testing.assert_array_equal(decode(case.arrays["cache_v"], case.fp16), present_v)


@pytest.mark.parametrize("tokens", [1, 2, 17, 33])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_pasts_around_tile_edges(tokens: int, group: int) -> None:
    for i, past in enumerate([0, 1, 63, 64, 65, 127, 128, 129]):
        check(Case(tokens, [past], group, seed=i), MaskMode.TREE, splits=(0, -1, 2)[i % 3])


@pytest.mark.parametrize(("tokens", "past", "group"), [(65, 4096, 4), (129, 65, 2), (513, 1000, 1), (1025, 1100, 1)])
def test_large_trees_and_long_pasts(tokens: int, past: int, group: int) -> None:
    check(Case(tokens, [past], group), MaskMode.TREE)


@pytest.mark.parametrize("mode", list(MaskMode))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fp16", [False, True])
def test_types_head_sizes_and_batches(mode: MaskMode, head_dim: int, fp16: bool) -> None:
    for splits in (0, -1, 5):
        check(Case(17, [300, 0, 65], 4, 2, head_dim, fp16), mode, splits)
    check(Case(33, [70], 2, 1, head_dim, fp16, tree=_with_path(range(33))), mode)  # a chain


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pasts = rng.integers(0, 200, rng.integers(1, 4))
    case = Case(
        int(rng.integers(1, 70)), pasts, int(rng.choice([1, 2, 4, 8, 20])), int(rng.integers(1, 3)),
        int(rng.choice([64, 128])), bool(rng.integers(2)), seed=seed,
    )  # fmt: skip
    check(case, MaskMode(int(rng.integers(3))), int(rng.integers(-1, 9)))


@pytest.mark.parametrize("multiprocessors", [1, 188])
def test_gpus_of_other_sizes(multiprocessors: int) -> None:
    """Blocks share the keys as they find room, and write no more than what is set aside."""
    emulated_kernels().emulate_multiprocessors(multiprocessors)
    try:
        for case in (1, [900, *[3] * 7], 4, 8), (17, [900, 0], 4, 2):
            check(Case(*case), MaskMode.TREE)
            check_in_child(_run_guarded, case)
    finally:
        emulated_kernels().emulate_multiprocessors(132)


def _run_guarded(case: tuple[int, list[int], int, int]) -> None:
    Case(*case).run(MaskMode.TREE, place=Guarded(at_end=True))


class Text:
    """A text's queries, keys and values at every position, and the attention of pieces of it in passes of all kinds."""

    def __init__(self, length: int, group: int, kv_heads: int, head_dim: int, fp16: bool) -> None:
        whole = Case(length, [0], group, kv_heads, head_dim, fp16, seed=length)
        self.q, self.k, self.v = (whole.arrays[name][0] for name in "qkv")
        self.sizes = group, kv_heads, head_dim, fp16
        self.alone = cache(self._alone)

    def _alone(self, position: int) -> np.ndarray:
        return self.row(0, position, [0], 1, MaskMode.CAUSAL)

    def row(
        self, i: int, past: int, path: Sequence[int], tokens: int, mode: MaskMode, splits: int = 0, beside: int = 0,
        seed: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """The sums of position past + i in a pass over so many tokens behind `past` rows, other sequences beside.
        Columns `path` are positions past, past + 1, …; others are other tokens, below any earlier one."""
        rng = np.random.default_rng(seed)
        own = int(rng.integers(beside + 1))
        pasts = rng.integers(0, 100, beside + 1)
        pasts[own] = past
        case = Case(tokens, pasts, *self.sizes, tree=_with_path(path), seed=seed)
        if mode is MaskMode.CAUSAL:
            case.seen[...] = np.arange(1, tokens + 1)
        after = past + np.arange(len(path))
        for name, values in (("q", self.q), ("k", self.k), ("v", self.v)):
            case.arrays[name][own, path] = values[after]
        for name, values in (("cache_k", self.k), ("cache_v", self.v)):
            case.arrays[name][case.slot_ids[own], :, :past] = values[:past].swapaxes(0, 1)
        case.run(mode, splits)
        return case.sums(own, path[i])


def _with_path(path: Sequence[int]) -> Tree:
    def parents(rng: np.random.Generator, tokens: int) -> np.ndarray:
        found = reference.random_parents(rng, tokens)
        found[list(path)] = [-1, *path[:-1]]
        return found

    return parents


def _gaps(rng: np.random.Generator, depth: int, tokens: int) -> list[int]:
    """The columns of a path to a node of that depth among so many tokens, with at least one gap where there is room."""
    return [0, *sorted(int(c) for c in rng.choice(np.arange(2, tokens), depth, replace=False))]


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "fp16"),
    [(1, 1, 64, False), (4, 1, 128, False), (2, 2, 64, True), (20, 1, 64, False)],
)
def test_a_row_has_the_same_bits_in_every_pass(group: int, kv_heads: int, head_dim: int, fp16: bool) -> None:
    """Alone, however blocks share its keys; in a chunk of a prompt, wherever its borders lie; in a chain; in a tree
    with gaps, shallow and deep; with other sequences beside."""
    text, rng = Text(600, group, kv_heads, head_dim, fp16), np.random.default_rng(head_dim + group)
    edges = [0, 15, 16, 79, 80, 271, 272, 335]
    for seed in range(28):
        position, kind = edges[seed] if seed < len(edges) else int(rng.integers(600)), seed % 7
        depth = int(rng.integers(min(position, 16) + 1))
        tokens, mode = depth + 3 + int(rng.integers(5)), MaskMode.TREE
        path = list(range(depth + 1))
        if kind == 0:
            mode = MaskMode.CAUSAL
        elif kind == 1:
            depth, path, tokens = 0, [0], 1
        elif kind in (2, 3) and position > 100:  # a long chain, and a deep tree
            depth = int(rng.integers(17, 80 if group < 20 else 20))
            tokens = depth + 4
            path = _gaps(rng, depth, tokens) if kind == 3 else list(range(depth + 1))
        elif kind > 3:
            path = _gaps(rng, depth, tokens)
        splits, beside = int(rng.choice([0, -1, -1, 1, 2, 3, 4, 5])), int(rng.integers(3)) if group < 20 else 0
        found = text.row(depth, position - depth, path, tokens, mode, splits, beside, seed)
        wrong = f"position {position}, path {path} of {tokens} tokens, {mode.name}, splits {splits}"
        np.testing.assert_array_equal(found, text.alone(position), err_msg=wrong)


def test_a_token_that_sees_nothing_gets_zeros() -> None:
    case = Case(5, [0])
    case.tree_mask[0, 3] = 0
    found = case.run(MaskMode.TREE)
    assert not found[0, 3].any() and found[0, 4].any()


def test_tree_mask_bits_of_later_tokens_are_ignored() -> None:
    case = Case(17, [9], 2)
    expected = Case(17, [9], 2).run(MaskMode.CAUSAL)
    case.tree_mask[...] = -1
    np.testing.assert_array_equal(case.run(MaskMode.TREE), expected)


def _run_garbage(at_end: bool) -> None:
    rng = np.random.default_rng(7)
    for past, slot in [(-(2**31), -5), (2**31 - 1, 2**31 - 1), (10**6, 3), (-1, -(2**31))]:
        guard = Guarded(at_end)
        case = Case(40, [20, 20], 4, 2)
        case.past_len[:], case.slot_ids[:] = past, (slot, 1)
        for name, array in case.arrays.items():
            case.arrays[name] = guard(np.where(array == POISON, 0x3800, array).astype(np.uint16))
        case.past_len, case.slot_ids = guard(case.past_len), guard(case.slot_ids)
        case.tree_mask = guard(rng.integers(-(2**31), 2**31, case.tree_mask.shape).astype(np.int32))
        expected = case.expected(MaskMode.TREE)[0]
        for splits in (-1, 0):
            assert np.abs(case.run(MaskMode.TREE, splits, guard) - expected).max() <= 2e-2


@pytest.mark.parametrize("at_end", [True, False])
def test_garbage_control_values_stay_in_bounds(at_end: bool) -> None:
    emulated_kernels()  # built before the child needs it
    check_in_child(_run_garbage, at_end)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": None}, "pointer"),
        ({"tree_mask": None}, "pointer"),
        ({"head_dim": 96}, "no kernel"),
        ({"q_heads": 3}, "extent"),
        ({"tokens": -1}, "extent"),
        ({"capacity": 4}, "extent"),
        ({"mask_words": 0}, "extent"),
        ({"scale": 0.0}, "extent"),
        ({"workspace_bytes": 16}, "workspace"),
    ],
)
def test_the_launcher_refuses(change: dict[str, Any], text: str) -> None:
    case = Case(5, [3], 2, 2)
    out, workspace = aligned(case.arrays["q"].shape, np.uint16), aligned((1 << 20,), np.uint8)
    good = case.fields(MaskMode.TREE, 2, out=out, workspace=workspace, workspace_bytes=1 << 20)
    with pytest.raises(EngineError, match=text):
        emulated_kernels().launch("tree_attention", **{**good, **change})
    with pytest.raises(EngineError, match="16 bytes"):
        emulated_kernels().launch("tree_attention", **{**good, "k": good["k"].ctypes.data + 2})
    emulated_kernels().launch("tree_attention", **good)


def test_nothing_to_do_needs_no_pointers() -> None:
    for empty in ("tokens", "sequences"):
        fields = Case(5, [3]).fields(MaskMode.TREE) | {"q": None, empty: 0}
        assert emulated_kernels().attention_workspace_bytes(**fields) == 0
        emulated_kernels().launch("tree_attention", **fields)


def _needs(
    q_heads: int, kv_heads: int, head_dim: int, capacity: int, max_batch: int, max_tokens: int
) -> list[list[int]]:
    """The launcher's own need of every call up to these extents, bytes [max_batch, max_tokens]."""
    extents = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity, "slots": max_batch}
    words = -(-max_tokens // 32)
    return [
        [
            emulated_kernels().attention_workspace_bytes(sequences=n, tokens=t, scale=0.1, mask_words=words, **extents)
            for t in range(1, max_tokens + 1)
        ]
        for n in range(1, max_batch + 1)
    ]


@pytest.mark.parametrize("max_batch", [1, 17])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "capacity"), [(32, 8, 128, 4353), (14, 2, 64, 1000), (4, 4, 64, 64)]
)
def test_the_bound_is_the_largest_need_of_any_call(
    q_heads: int, kv_heads: int, head_dim: int, capacity: int, max_batch: int
) -> None:
    """What is set aside must do for every number of sequences and tokens: units of few rows are stored one by one."""
    max_tokens = min(257, capacity)
    needs = _needs(q_heads, kv_heads, head_dim, capacity, max_batch, max_tokens)
    bound = _native.attention_workspace_bound(max_batch, max_tokens, q_heads, kv_heads, head_dim, capacity)
    assert bound == max(map(max, needs))


@pytest.mark.parametrize("change", [{"sequences": 0}, {"tokens": 300}, {"q_heads": 3}])
def test_the_bound_of_impossible_extents_is_refused(change: dict[str, int]) -> None:
    good = {"sequences": 1, "tokens": 16, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "capacity": 256}
    assert _native.attention_workspace_bound(**good) > 0
    with pytest.raises(ValueError, match="tokens at most capacity"):
        _native.attention_workspace_bound(**{**good, **change})
