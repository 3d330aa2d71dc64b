"""Time the kernels on a GPU: medians of CUDA-graph replays over input sets several times the L2.

    python -m tools.gpu.kernel_bench TORCH_LIBRARY RESULT.json

The bandwidth to compare with is a large device-to-device copy, bytes read plus bytes written, measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HQ, HKV, DIM = 32, 8, 128
SCALE = DIM**-0.5
COLD_BYTES = 400 << 20  # rotate among at least so many bytes, so that nothing read twice is in the L2


def milliseconds(work: Callable[[], object], calls: int, repeats: int = 21) -> dict[str, float]:
    """Median and spread, per call, of a graph that holds `calls` calls, one after another."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    times.sort()
    return {"median": statistics.median(times), "low": times[len(times) // 10], "high": times[-1 - len(times) // 10]}


def copy_gb_per_s() -> float:
    """Bytes read plus bytes written per second of a 4 GiB copy."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), 1)["median"] / 1e6


class AttentionCase:
    """Attention of T tokens in a binary tree over a past, on input sets that are together larger than the L2."""

    def __init__(self, tokens: int, past: int) -> None:
        self.kv_bytes = 2 * 2 * HKV * DIM * (past + tokens)
        self.flops = 4 * HQ * DIM * tokens * (past + tokens)
        self.mask, self.seen = binary_tree_masks(tokens, past)
        self.slot = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.length = torch.full((1,), past, dtype=torch.int32, device="cuda")
        self.calls: list[tuple[Tensor, ...]] = []  # q, k, v, cache_k, cache_v, out
        self.dense: list[list[Tensor]] = []  # q, keys, values of SDPA
        capacity, rows = past + 256, slice(0, past + tokens)
        normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(4, -(-COLD_BYTES // self.kv_bytes))):
            q, k, v = normal(1, tokens, HQ, DIM), normal(1, tokens, HKV, DIM), normal(1, tokens, HKV, DIM)
            cache_k, cache_v = normal(1, HKV, capacity, DIM), normal(1, HKV, capacity, DIM)
            self.calls.append((q, k, v, cache_k, cache_v, torch.empty_like(q)))
            # SDPA gets contiguous keys: the cost of concatenating past and new is not counted against it.
            self.dense.append([x.contiguous() for x in (q.transpose(1, 2), cache_k[:, :, rows], cache_v[:, :, rows])])

    def time_kernels(self, splits: int = 0) -> dict[str, float]:
        """Milliseconds of our kernels; 0 splits lets the launcher choose."""
        q, _, _, cache_k, _, _ = self.calls[0]
        size = torch.ops.ddtree.attention_workspace_bytes(q, cache_k, self.mask.size(2), 0, SCALE, splits)
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")

        def run() -> None:
            for *inputs, out in self.calls:
                torch.ops.ddtree.tree_attention(
                    *inputs, self.slot, self.length, self.mask, 0, SCALE, out, workspace, splits
                )

        return milliseconds(run, len(self.calls))

    def time_sdpa(self) -> dict[str, dict[str, float]]:
        """Milliseconds of PyTorch's SDPA under a mask: with grouped heads, and with heads repeated beforehand, which
        allows kernels that know no groups."""
        repeated = [(q, *(x.repeat_interleave(HQ // HKV, 1) for x in (k, v))) for q, k, v in self.dense]

        def run(inputs: Sequence[Sequence[Tensor]], **options: bool) -> None:
            for q, k, v in inputs:
                F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen, scale=SCALE, **options)

        return {
            "gqa": milliseconds(lambda: run(self.dense, enable_gqa=True), len(self.dense)),
            "repeated": milliseconds(lambda: run(repeated), len(repeated)),
        }


def binary_tree_masks(tokens: int, past: int) -> tuple[Tensor, Tensor]:
    """A binary tree's packed mask int32 [1, T, W], and the same with the past as bool [1, 1, T, past + T]."""
    parents = torch.arange(-1, tokens - 1, dtype=torch.int32, device="cuda") // 2
    parents[0] = -1
    mask = torch.zeros(1, tokens, -(-tokens // 32), dtype=torch.int32, device="cuda")
    torch.ops.ddtree.packed_mask(parents[None].contiguous(), mask)
    column = torch.arange(tokens, device="cuda")
    seen = F.pad((mask[0][:, column // 32] >> (column % 32)) & 1 == 1, (past, 0), value=True)[None, None]
    return mask, seen


def attention(tokens: int, past: int, copy: float) -> dict[str, Any]:
    """Times and rates of one case; `copy` is the bandwidth to compare with, in GB/s."""
    case = AttentionCase(tokens, past)
    mine, theirs = case.time_kernels(), case.time_sdpa()
    row = {
        "tokens": tokens,
        "past": past,
        "sets": len(case.calls),
        "ms": mine,
        "gb_per_s": case.kv_bytes / mine["median"] / 1e6,
        "of_copy": case.kv_bytes / mine["median"] / 1e6 / copy,
        "tflop_per_s": case.flops / mine["median"] / 1e9,
        "sdpa_mask_ms": theirs,
        "over_sdpa": min(x["median"] for x in theirs.values()) / mine["median"],
    }
    if past >= 4096 and tokens in (1, 65):
        splits = [s for s in (4, 8, 16, 32, 48, 64) if s * 64 <= past]
        row["ms_by_splits"] = {s: case.time_kernels(s)["median"] for s in splits}
    return row


def compaction() -> dict[str, Any]:
    """Time of compacting 16 rows in a cache of 36 layers."""
    planes, capacity, rows = 2 * 36, 4096, 16
    cache = torch.randn(planes, 4, HKV, capacity, DIM, device="cuda", dtype=torch.bfloat16)
    keep = torch.arange(rows, dtype=torch.int32, device="cuda")[None] * 3 + 1
    count = torch.tensor([rows], dtype=torch.int32, device="cuda")
    slots = [torch.tensor([s], dtype=torch.int32, device="cuda") for s in range(4)]
    starts = [torch.tensor([s], dtype=torch.int32, device="cuda") for s in range(100, 3900, 400)]

    def run() -> None:
        for slot in slots:
            for start in starts:
                torch.ops.ddtree.compact(cache, slot, start, keep, count)

    moved = 2 * planes * HKV * rows * DIM * 2
    ms = milliseconds(run, len(slots) * len(starts))
    return {"planes": planes, "heads": HKV, "rows": rows, "ms": ms, "gb_per_s": moved / ms["median"] / 1e6}


def round_stages(budget: int) -> dict[str, Any]:
    """Times of tree build, packed mask and walk."""
    n, length, width, tokens, calls = 1, 15, 64, 1 + budget, 20
    log_probs = torch.randn(n, length, width, device="cuda").log_softmax(-1).sort(-1, descending=True)[0].contiguous()
    integer = partial(torch.zeros, dtype=torch.int32, device="cuda")
    candidates = torch.randint(0, 150_000, (n, length, width), dtype=torch.int32, device="cuda")
    ids, parents, depths, positions, path = (integer(n, tokens) for _ in range(5))
    weights = torch.zeros(n, tokens, dtype=torch.float64, device="cuda")
    counts, lengths, bonus, root, past = (integer(n) for _ in range(5))
    mask, choices = integer(n, tokens, -(-tokens // 32)), integer(n, tokens)

    def build() -> None:
        for _ in range(calls):
            torch.ops.ddtree.build_tree(
                log_probs, candidates, root, None, past, ids, parents, depths, positions, weights, counts
            )

    def pack() -> None:
        for _ in range(calls):
            torch.ops.ddtree.packed_mask(parents, mask)

    def walk() -> None:
        for _ in range(calls):
            torch.ops.ddtree.walk(parents, ids, choices, counts, None, path, lengths, bonus, None)

    stages = {"build_tree": milliseconds(build, calls), "packed_mask": milliseconds(pack, calls)}
    # The walk down the most probable path: the longest one.
    spine = candidates[0, :, 0]
    choices[0] = torch.where(depths[0] < length, spine[depths[0].long().clamp(max=length - 1)], -1)
    stages["walk"] = milliseconds(walk, calls)
    return {"budget": budget, "positions": length, "candidates": width, "walked": lengths.tolist(), "ms": stages}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    torch.ops.load_library(str(args.library))
    properties = torch.cuda.get_device_properties(0)
    copy = copy_gb_per_s()
    report: dict[str, Any] = {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gb_per_s": copy,
        "heads": [HQ, HKV],
        "head_dim": DIM,
        "attention": [attention(t, p, copy) for p in (512, 4096, 32768) for t in (1, 17, 65, 129)],
        "compaction": compaction(),
        "round": [round_stages(budget) for budget in (16, 64, 256, 1024)],
    }
    args.result.write_text(json.dumps(report, indent=1))
    print(f"{report['gpu']}: copy {copy:.0f} GB/s")
    for row in report["attention"]:
        print(
            f"attention T={row['tokens']:4d} past={row['past']:6d}: {row['ms']['median'] * 1e3:8.1f} us "
            f"{row['of_copy']:6.1%} of copy, {row['tflop_per_s']:6.1f} TFLOP/s, {row['over_sdpa']:5.2f}x SDPA's speed"
        )
    print(f"compaction: {report['compaction']['ms']['median'] * 1e3:.1f} us")
    for row in report["round"]:
        print(f"B={row['budget']}: " + ", ".join(f"{k} {v['median'] * 1e3:.1f} us" for k, v in row["ms"].items()))


if __name__ == "__main__":
    main()
