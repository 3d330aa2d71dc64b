"""Check the torch operators on a GPU: attention against fp32 SDPA, and the bits of its rows in passes of all kinds;
tree build and commit against the host; candidates and delta nets against PyTorch; compaction; and times of them.

    python -m tools.gpu.kernel_check TORCH_LIBRARY HOST_TREE_LIBRARY RESULT.json [--device cpu]

With --device cpu the library is the one on emulated kernels: few, small cases, to check this script.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TREE, CAUSAL, NONE = 0, 1, 2
MODES = {"tree": TREE, "causal": CAUSAL, "none": NONE}


def random_parents(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return np.array([-1, *(rng.integers(0, i) for i in range(1, tokens))], np.int32)


class Attention:
    """One call's tensors; unused cache rows and the output are NaN, so that a wrong read or a missing write shows."""

    def __init__(
        self,
        device: str,
        n: int,
        tokens: int,
        hq: int,
        hkv: int,
        dim: int,
        capacity: int,
        dtype: torch.dtype,
        mode: int,
        seed: int = 0,
        splits: int = 0,
        path: list[int] | None = None,
    ) -> None:
        """`path`: columns of every tree that hang below each other; others hang anywhere."""
        rng = np.random.default_rng(seed)
        make = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, device=device).to(dtype)

        self.mode, self.scale, self.splits, slots = mode, dim**-0.5, splits, n + 1
        self.q, self.k, self.v = (normal(n, tokens, heads, dim) for heads in (hq, hkv, hkv))
        self.full_k, self.full_v = normal(slots, hkv, capacity, dim), normal(slots, hkv, capacity, dim)
        self.slots = torch.tensor(rng.permutation(slots)[:n].astype(np.int32), device=device)
        trees = np.stack([random_parents(rng, tokens) for _ in range(n)])
        if path is not None:
            trees[:, path] = [-1, *path[:-1]]
        parents = torch.tensor(trees, device=device)
        self.mask = torch.zeros(n, tokens, -(-tokens // 32), dtype=torch.int32, device=device)
        torch.ops.ddtree.packed_mask(parents, self.mask)
        self.past = torch.zeros(n, dtype=torch.int32, device=device)
        self.cache_k, self.cache_v = torch.empty_like(self.full_k), torch.empty_like(self.full_v)
        self.out = torch.empty_like(self.q)
        extents = self.q, self.cache_k, self.mask.size(2), mode, self.scale, splits
        size = torch.ops.ddtree.attention_workspace_bytes(*extents)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def reset(self, past: tuple[int, ...]) -> None:
        self.past.copy_(torch.tensor(past, dtype=torch.int32))
        self.cache_k.fill_(float("nan"))
        self.cache_v.fill_(float("nan"))
        self.out.fill_(float("nan"))
        for slot, length in zip(self.slots.tolist(), past, strict=True):
            self.cache_k[slot, :, :length] = self.full_k[slot, :, :length]
            self.cache_v[slot, :, :length] = self.full_v[slot, :, :length]

    def launch(self) -> None:
        torch.ops.ddtree.tree_attention(
            self.q, self.k, self.v, self.cache_k, self.cache_v, self.slots, self.past, self.mask, self.mode,
            self.scale, self.out, self.workspace, self.splits,
        )  # fmt: skip

    def visible(self, n: int) -> Tensor:
        tokens = self.q.size(1)
        if self.mode == NONE:
            return torch.ones(tokens, tokens, dtype=torch.bool, device=self.q.device)
        if self.mode == CAUSAL:
            return torch.ones(tokens, tokens, dtype=torch.bool, device=self.q.device).tril()
        column = torch.arange(tokens, device=self.q.device)
        return (self.mask[n][:, column // 32] >> (column % 32)) & 1 == 1

    def errors(self, past: tuple[int, ...]) -> tuple[float, float]:
        """(largest absolute error, relative norm) against dense fp32 SDPA. Raises AssertionError for a wrong cache."""
        worst, wrong, whole = 0.0, 0.0, 0.0
        group = self.q.size(2) // self.k.size(2)
        for n, (slot, length) in enumerate(zip(self.slots.tolist(), past, strict=True)):
            for cache, full, new in ((self.cache_k, self.full_k, self.k), (self.cache_v, self.full_v, self.v)):
                rows = slice(length, length + self.q.size(1))
                assert torch.equal(cache[slot, :, :length], full[slot, :, :length]), "a committed row changed"
                assert torch.equal(cache[slot, :, rows], new[n].transpose(0, 1)), "a new row was not appended"
                assert cache[slot, :, rows.stop :].isnan().all(), "a row after the new ones was written"
            keys = torch.cat((self.full_k[slot, :, :length], self.k[n].transpose(0, 1)), 1).float()
            values = torch.cat((self.full_v[slot, :, :length], self.v[n].transpose(0, 1)), 1).float()
            seen = F.pad(self.visible(n), (length, 0), value=True)
            expected = F.scaled_dot_product_attention(
                self.q[n].transpose(0, 1).float()[None],
                keys.repeat_interleave(group, 0)[None],
                values.repeat_interleave(group, 0)[None],
                attn_mask=seen,
                scale=self.scale,
            )[0].transpose(0, 1)
            found = self.out[n].float()
            assert found.isfinite().all(), "the output has NaN: an unused row was read or an element was not written"
            worst = max(worst, (found - expected).abs().max().item())
            wrong += (found - expected).double().square().sum().item()
            whole += expected.double().square().sum().item()
        return worst, (wrong / whole) ** 0.5


def check_attention(device: str) -> dict[str, Any]:
    """Check every case eagerly and, on a GPU, as one captured graph replayed for several lengths."""
    cuda = device == "cuda"
    heads = [(8, 8), (8, 4), (32, 8), (16, 2)] if cuda else [(4, 2)]
    results: list[dict[str, Any]] = []
    for dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for mode_name, mode in MODES.items():
                for hq, hkv in heads:
                    for tokens in (1, 2, 17, 33, 65, 129, 513, 1025) if cuda else (1, 17):
                        if tokens > 65 and hq == 16:
                            continue
                        capacity = (5200 if cuda else 300) + tokens
                        case = Attention(device, 2, tokens, hq, hkv, dim, capacity, dtype, mode, seed=tokens)
                        lengths = [(0, 63), (64, 65), (129, 4096), (5000, 1)] if cuda else [(129, 0)]
                        for past in lengths:
                            case.reset(past)
                            case.launch()
                            eager = case.errors(past)
                            results.append({"tokens": tokens, "past": past, "heads": (hq, hkv), "dim": dim,
                                            "dtype": str(dtype), "mode": mode_name, "max_abs": eager[0],
                                            "relative": eager[1]})  # fmt: skip
                        if cuda:
                            graph = torch.cuda.CUDAGraph()
                            with torch.cuda.graph(graph):
                                case.launch()
                            for past in lengths:
                                case.reset(past)
                                case.launch()
                                eager_out = case.out.clone()
                                case.reset(past)
                                graph.replay()
                                torch.cuda.synchronize()
                                assert torch.equal(eager_out, case.out), "a replayed graph differs from the launch"
    worst = max(r["max_abs"] for r in results)
    relative = max(r["relative"] for r in results)
    return {
        "cases": len(results),
        "max_abs": worst,
        "relative": relative,
        "ok": worst <= 2e-2 and relative <= 1e-2,
        "worst_cases": sorted(results, key=lambda r: -r["relative"])[:5],
    }


class Text:
    """Queries, keys and values of a text, and the attention of its last row in passes over pieces of it."""

    def __init__(self, device: str, length: int, dim: int, dtype: torch.dtype, hq: int, hkv: int) -> None:
        make = torch.Generator(device).manual_seed(dim)
        shapes = [(length, heads, dim) for heads in (hq, hkv, hkv)]
        self.q, self.k, self.v = (torch.randn(*shape, generator=make, device=device).to(dtype) for shape in shapes)

    def row(self, past: int, path: list[int], tokens: int, mode: int, n: int, splits: int, seed: int) -> Tensor:
        """[Hq, D] of the last column of `path`, which follow `past` rows in the last of n sequences."""
        (length, hq, dim), hkv, dtype = self.q.shape, self.k.size(1), self.q.dtype
        case = Attention(self.q.device.type, n, tokens, hq, hkv, dim, length + 300, dtype, mode, seed, splits, path)
        for given, full, values in ((case.k, case.full_k, self.k), (case.v, case.full_v, self.v)):
            given[-1, path] = values[past : past + len(path)]
            full[case.slots[-1], :, :past] = values[:past].transpose(0, 1)
        case.q[-1, path] = self.q[past : past + len(path)]
        case.reset((*[37] * (n - 1), past))
        case.launch()
        return case.out[-1, path[-1]]


def check_bits(device: str) -> dict[str, Any]:
    """Whether rows alone, in chunks, chains, trees with gaps, beside others, however blocks share keys, are equal."""
    rows, rng = 0, np.random.default_rng(5)
    length, each = (4600, 60) if device == "cuda" else (340, 2)
    for dim, dtype, hq, hkv in ((128, torch.bfloat16, 32, 8), (64, torch.float16, 9, 3), (128, torch.bfloat16, 20, 1)):
        text = Text(device, length, dim, dtype, hq, hkv)
        for seed in range(each):
            position, wide = int(rng.integers(length)), int(rng.choice([17, 33, 65, 257] if device == "cuda" else [17]))
            alone = text.row(position, [0], 1, TREE, 1, 0, seed)
            for depth in {min(position, d) for d in (0, int(rng.integers(17)), int(rng.integers(17, 90)))}:
                tokens = max(wide, depth + 3)
                gaps = [0, *sorted(rng.choice(np.arange(2, tokens), depth, replace=False).tolist())]
                chain = list(range(depth + 1))
                for path, mode in ((chain, CAUSAL), (chain, TREE), (gaps, TREE)):
                    n, splits = int(rng.integers(1, 5 if device == "cuda" else 2)), int(rng.choice([0, -1, 1, 3, 5]))
                    found = text.row(position - depth, path, tokens, mode, n, splits, seed)
                    assert torch.equal(found, alone), f"{position}: {path} of {tokens}, mode {mode}, N {n}, {splits}"
                    rows += hq
    return {"rows": rows, "ok": True}


def time_attention(device: str) -> dict[str, Any]:
    """Microseconds of one layer of Qwen3-8B's shape by rows and past, both kernels."""
    report: dict[str, Any] = {"ok": True}
    for tokens, past in (
        [(t, p) for t in (1, 64, 128) for p in (512, 1024, 4096, 8192, 32_000)] if device == "cuda" else [(1, 70)]
    ):
        case = Attention(device, 1, tokens, 32, 8, 128, past + tokens, torch.bfloat16, TREE)
        case.reset((past,))
        report[f"{tokens} rows behind {past}"] = microseconds(device, case.launch)
    return report


def as_pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def host_trees(host: ctypes.CDLL, log_probs: np.ndarray, budgets: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Parents, ranks, depths and log-weights [cases, tokens] and counts [cases] of the host's trees."""
    cases, length, width = log_probs.shape
    found: list[np.ndarray] = [np.full((cases, tokens), value, np.int32) for value in (-1, 0, 0)]
    found += [np.full((cases, tokens), -np.inf), np.zeros(cases, np.int32)]
    places = map(as_pointer, found)
    bad = host.host_build_trees(as_pointer(log_probs), cases, length, width, as_pointer(budgets), tokens, *places)
    assert bad == -1, f"the host refused case {bad}"
    return found


def check_trees(device: str, host: ctypes.CDLL, cases: int) -> dict[str, Any]:
    """Compare build and walk of `cases` random trees, a third of them full of ties, bit by bit with the host's."""
    rng = np.random.default_rng(0)
    batch = min(cases, 500)
    done = 0
    while done < cases:
        length, width, tokens = int(rng.integers(1, 17)), int(rng.integers(1, 65)), int(rng.choice([1, 2, 17, 65, 257]))
        shape = (batch, length, width)
        values = rng.choice([0.0, -0.25, -0.5, -1.0, -np.inf], shape) if done % 3 == 0 else -rng.exponential(2.0, shape)
        log_probs = -np.sort(-values.astype(np.float32), axis=2)
        # Few distinct tokens make long walks; siblings may share one, and then the first must win.
        candidates = rng.integers(0, 5, shape).astype(np.int32)
        budgets = rng.integers(0, tokens, batch).astype(np.int32)
        roots = rng.integers(0, 5, batch).astype(np.int32)
        dev = partial(torch.tensor, device=device)
        ids, parents, depths = (torch.full((batch, tokens), -7, dtype=torch.int32, device=device) for _ in range(3))
        counts = torch.full((batch,), -7, dtype=torch.int32, device=device)
        outlook = int(rng.choice([1, min(2 * tokens, 256)]))
        weights = torch.full((batch, outlook), float("nan"), device=device)
        outlook_depths = torch.full((batch, outlook), -7, dtype=torch.int32, device=device)
        torch.ops.ddtree.build_tree(
            dev(log_probs), dev(candidates), dev(roots), dev(budgets), None, ids, parents, depths, None, counts,
            weights, outlook_depths,
        )  # fmt: skip
        choices = rng.integers(0, 5, (batch, tokens)).astype(np.int32)
        slots, flags = torch.arange(batch, dtype=torch.int32, device=device), torch.ones_like(counts)
        before, states = (torch.zeros(4, batch, dtype=torch.int32, device=device) for _ in range(2))
        rows = torch.randn(2, batch, tokens, 8, device=device)  # of the tapped states, of the cache
        cache, waiting = rows[1][None, :, None].clone(), torch.zeros(batch, 1 + length, 8, device=device)
        result = torch.full((batch, 2 * (2 + length + tokens + outlook)), -7, dtype=torch.int32, device=device)
        torch.ops.ddtree.commit(
            parents, ids, dev(choices), counts, weights, outlook_depths, slots, flags, flags, before, rows[0], cache,
            waiting, states, result,
        )  # fmt: skip
        found_lengths, path = result[:, 1], result[:, 3 + length : 4 + 2 * length]

        want_parents, want_ranks, want_depths, _, want_counts = host_trees(host, log_probs, budgets, tokens)
        whole = np.where(budgets > 0, outlook, 0).astype(np.int32)
        _, _, seen_depths, seen_weights, _ = host_trees(host, log_probs, whole, 1 + outlook)
        case, column = np.ogrid[:batch, :tokens]
        drafted = (column > 0) & (column < want_counts[:, None])
        want_ids = np.where(drafted, candidates[case, np.maximum(want_depths - 1, 0), want_ranks], roots[:, None])
        want_ids = want_ids.astype(np.int32)
        want_path, want_lengths = np.full((batch, tokens), -1, np.int32), np.zeros(batch, np.int32)
        host.host_walks(
            as_pointer(want_parents), as_pointer(want_ids), as_pointer(choices), as_pointer(want_counts), batch, tokens,
            as_pointer(want_path), as_pointer(want_lengths),
        )  # fmt: skip
        last = want_path[np.arange(batch), want_lengths - 1]
        for name, found, wanted in (
            ("counts", counts, want_counts), ("parents", parents, want_parents), ("depths", depths, want_depths),
            ("token_ids", ids, want_ids), ("log_weights", weights, seen_weights[:, 1:].astype(np.float32)),
            ("outlook_depths", outlook_depths, seen_depths[:, 1:]), ("lengths", found_lengths, want_lengths),
            ("next_tokens", states[3], choices[np.arange(batch), last]),
            ("path", path[:, :tokens], want_path[:, : 1 + length]),
            ("committed lengths", states[0], want_lengths),
        ):  # fmt: skip
            np.testing.assert_array_equal(found.cpu().numpy(), wanted, err_msg=f"{name} at L={length} K={width}")
        done += batch
    return {"cases": done, "ok": True}


def check_compaction(device: str, cases: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    for case in range(cases):
        planes, slots, heads, capacity, dim = 6, 3, int(rng.integers(1, 9)), 300, int(rng.choice([64, 128]))
        cache = torch.randint(-(2**15), 2**15, (planes, slots, heads, capacity, dim), dtype=torch.int16, device=device)
        expected = cache.clone()
        slot_ids, past = rng.permutation(slots)[:2].astype(np.int32), rng.integers(0, capacity, 2).astype(np.int32)
        keep, count = np.full((2, 40), -1, np.int32), np.zeros(2, np.int32)
        for n in range(2):
            rows = np.sort(rng.permutation(capacity - past[n])[: rng.integers(0, 41)])
            keep[n, : len(rows)], count[n] = rows, len(rows)
            moved = cache[:, slot_ids[n]][:, :, torch.tensor(past[n] + rows, device=device, dtype=torch.long)]
            expected[:, slot_ids[n], :, past[n] : past[n] + len(rows)] = moved
        control = [torch.tensor(a, device=device) for a in (slot_ids, past, keep, count)]
        torch.ops.ddtree.compact(cache, *control)
        assert torch.equal(cache, expected), f"compaction of case {case} differs"
    return {"cases": cases, "ok": True}


def check_candidates(device: str) -> dict[str, Any]:
    """Compare with topk and logsumexp. Of equal logits the first come first, which topk does not promise."""
    make = torch.Generator(device).manual_seed(2)
    sizes = [(15, 151_936), (3, 49_152), (4, 1000)] if device == "cuda" else [(2, 9000)]
    for rows, vocabulary in sizes:
        plain = 5 * torch.randn(rows, vocabulary, generator=make, device=device)
        tied = plain.round()
        tied[:, ::3] = -torch.inf
        for k in (1, 3, 64, 1000):
            for logits, normalised in ((plain, False), (plain, True), (tied, False)):
                best = torch.empty(rows, k, device=device)
                ids = torch.empty(rows, k, dtype=torch.int32, device=device)
                torch.ops.ddtree.draft_top(logits, normalised, best, ids)
                wanted, order = (x[:, :k] for x in logits.sort(descending=True, stable=True))
                if normalised:
                    wanted = wanted - logits.logsumexp(-1, keepdim=True)
                assert torch.equal(ids.long(), order), f"candidates at V={vocabulary} K={k}"
                assert (best - wanted).abs().nan_to_num().max() <= (1e-5 if normalised else 0), f"K={k}"
    return {"cases": 12 * len(sizes), "ok": True}


def check_delta(device: str) -> dict[str, Any]:
    """Gated delta nets over trees and the commit of a path, against PyTorch's; and microseconds of both, of a layer."""
    from ddtree_trt.runtime.engines.torch.delta import Ancestors, Kept, advanced, tree_pass

    report: dict[str, Any] = {"ok": True}
    rng, make, cuda = np.random.default_rng(5), torch.Generator(device).manual_seed(5), device == "cuda"
    hk, hv, dim, slots = (16, 32, 128, 3) if cuda else (1, 2, 32, 3)
    for n, tokens in ((1, 1), (1, 17), (2, 64), (1, 257)) if cuda else ((2, 17),):
        normal = partial(torch.randn, generator=make, device=device)
        width = (2 * hk + hv) * dim
        mixed, states, past = normal(n, tokens, width), normal(1, slots, hv, dim, dim), normal(1, slots, 3, width)
        decays, steps = -normal(n, tokens, hv).abs(), normal(n, tokens, hv).sigmoid()
        parents = torch.tensor(np.stack([random_parents(rng, tokens) for _ in range(n)]), device=device)
        slot_ids = torch.tensor(rng.permutation(slots)[:n].astype(np.int32), device=device)
        mask = torch.zeros(n, tokens, -(-tokens // 32), dtype=torch.int32, device=device)
        torch.ops.ddtree.packed_mask(parents, mask)
        seen = Ancestors.of_trees(mask, parents).seen
        kept, wanted = (
            Kept(torch.empty(n, tokens, hk, dim, device=device), torch.empty(n, tokens, hv, dim, device=device),
                 torch.empty(n, tokens, hv, dtype=torch.float64, device=device), mixed)
            for _ in range(2)
        )  # fmt: skip
        out, of_slots = torch.empty_like(kept.updates), states[0, slot_ids.long()]
        qkv = [part.unflatten(-1, (-1, dim)) for part in mixed.split((hk * dim, hk * dim, hv * dim), -1)]
        ours = partial(torch.ops.ddtree.delta_tree, mixed, decays, steps, parents, states[0], slot_ids, out,
                       kept.keys, kept.updates, kept.decays)  # fmt: skip
        theirs = partial(tree_pass, qkv, decays, steps, of_slots, seen, wanted)
        ours()
        expected = theirs()
        pairs = [(out, expected), (kept.keys, wanted.keys), (kept.updates, wanted.updates)]
        path = [tokens - 1]
        while (parent := int(parents[0, path[-1]])) >= 0:
            path.append(parent)
        rows, slot = torch.tensor(path[::-1], dtype=torch.int32, device=device), int(slot_ids[0])
        behind, _ = advanced(states[0, slot], past[0, slot], wanted.select(0, rows.long()))
        stored = [part[:1] for part in (kept.keys, kept.updates, kept.decays, mixed)]
        commit = partial(torch.ops.ddtree.delta_commit, states, past, *stored, rows, 0, len(path), slot)
        commit()
        for found, reference in (*pairs, (states[0, slot], behind)):
            error = float((found - reference).abs().max() / reference.abs().max())
            assert error < 1e-5, f"delta net of {n} x {tokens} rows: {error:.1e}"
        for name, work in (("kernel", ours), ("PyTorch", theirs), ("commit", commit)):
            report[f"{name}, {n} x {tokens} rows"] = microseconds(device, work)
    return report


def microseconds(device: str, work: Callable[[], Any]) -> float:
    """Of a captured graph of the work: the least of several replays. On a CPU it is run once, and the figure is 0."""
    if device != "cuda":
        work()
        return 0.0
    graph, marks = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    found = []
    for _ in range(20):
        marks[0].record()
        graph.replay()
        marks[1].record()
        marks[1].synchronize()
        found.append(100 * marks[0].elapsed_time(marks[1]))
    return min(found)


def time_drafts(device: str) -> dict[str, Any]:
    """Microseconds of trees by their nodes, and of candidates by rows of 151,936 logits, ours and PyTorch's."""
    cuda, ops = device == "cuda", torch.ops.ddtree
    report: dict[str, Any] = {"ok": True}
    make = torch.Generator(device).manual_seed(3)
    control = partial(torch.zeros, dtype=torch.int32, device=device)
    for nodes in (16, 64, 256, 1024) if cuda else (16,):
        log_probs = torch.randn(1, 15, nodes, generator=make, device=device).sort(descending=True)[0].log_softmax(-1)
        tree = [control(1, 1 + nodes) for _ in range(3)]
        given = log_probs, control(1, 15, nodes), control(1), None, None, *tree, None, control(1)
        report[f"build_tree of {nodes} nodes"] = microseconds(device, partial(ops.build_tree, *given))
    for rows in (15, 192, 960) if cuda else (1,):
        logits = 5 * torch.randn(rows, 151_936, generator=make, device=device)
        best, ids = torch.empty(rows, 64, device=device), control(rows, 64)
        for name, work in (
            ("draft_top", partial(ops.draft_top, logits, True, best, ids)),
            ("topk", partial(torch.topk, logits, 64)),
            ("logsumexp", partial(torch.logsumexp, logits, -1)),
        ):
            report[f"{name} of {rows} rows"] = microseconds(device, work)
    return report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("host", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.ops.load_library(str(args.library))
    host = ctypes.CDLL(str(args.host))
    host.host_build_trees.restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    host.host_build_trees.argtypes = (pointer, *[number] * 3, pointer, number, *[pointer] * 5)
    host.host_walks.argtypes = (*[pointer] * 4, *[number] * 2, *[pointer] * 2)
    small = args.device == "cpu"
    report = {}
    for name, check in (
        ("trees", lambda: check_trees(args.device, host, 100 if small else 10_000)),
        ("candidates", lambda: check_candidates(args.device)),
        ("compaction", lambda: check_compaction(args.device, 10 if small else 200)),
        ("attention", lambda: check_attention(args.device)),
        ("delta", lambda: check_delta(args.device)),
        ("bits", lambda: check_bits(args.device)),
        ("attention_microseconds", lambda: time_attention(args.device)),
        ("microseconds", lambda: time_drafts(args.device)),
    ):
        began = time.perf_counter()
        try:
            report[name] = check()
        except (AssertionError, RuntimeError) as error:
            report[name] = {"ok": False, "error": str(error)[:2000]}
        report[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(name, json.dumps({k: v for k, v in report[name].items() if k != "worst_cases"}), flush=True)
    args.result.write_text(json.dumps(report, indent=1))
    return 0 if all(part["ok"] for part in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
