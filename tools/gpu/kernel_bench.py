"""Times the kernels on a GPU: medians of CUDA-graph replays over input sets several times the L2.

    python -m tools.gpu.kernel_bench TORCH_LIBRARY RESULT.json

The bandwidth to compare with is a large device-to-device copy, bytes read plus bytes written, measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HQ, HKV, DIM = 32, 8, 128
COLD_BYTES = 400 << 20  # rotate among at least so many bytes, so that nothing read twice lies in the L2


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


def compared(
    tokens: int, past: int, mine: dict[str, float], theirs: dict[str, dict[str, float]], copy: float
) -> dict[str, Any]:
    """Times [ms] as shares of what the device can do: of its bandwidth, where `copy` is that of a copy [GB/s], and of
    its arithmetic."""
    kv_bytes = 2 * 2 * HKV * DIM * (past + tokens)
    flops = 4 * HQ * DIM * tokens * (past + tokens)
    return {
        "ms": mine,
        "gb_per_s": kv_bytes / mine["median"] / 1e6,
        "of_copy": kv_bytes / mine["median"] / 1e6 / copy,
        "tflop_per_s": flops / mine["median"] / 1e9,
        "sdpa_mask_ms": theirs,
        "over_sdpa": min(x["median"] for x in theirs.values()) / mine["median"],
    }


def attention(tokens: int, past: int, copy: float) -> dict[str, Any]:
    kv_bytes = 2 * 2 * HKV * DIM * (past + tokens)
    sets = max(4, -(-COLD_BYTES // kv_bytes))
    capacity, scale = past + 256, DIM**-0.5
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    calls, dense = [], []
    parents = torch.arange(-1, tokens - 1, dtype=torch.int32, device="cuda") // 2  # a binary tree
    parents[0] = -1
    mask = torch.zeros(1, tokens, -(-tokens // 32), dtype=torch.int32, device="cuda")
    torch.ops.ddtree.packed_mask(parents[None].contiguous(), mask)
    column = torch.arange(tokens, device="cuda")
    seen = F.pad((mask[0][:, column // 32] >> (column % 32)) & 1 == 1, (past, 0), value=True)[None, None]
    slot = torch.zeros(1, dtype=torch.int32, device="cuda")
    length = torch.full((1,), past, dtype=torch.int32, device="cuda")
    for _ in range(sets):
        q, k, v = normal(1, tokens, HQ, DIM), normal(1, tokens, HKV, DIM), normal(1, tokens, HKV, DIM)
        cache_k, cache_v = normal(1, HKV, capacity, DIM), normal(1, HKV, capacity, DIM)
        calls.append((q, k, v, cache_k, cache_v, torch.empty_like(q)))
        # SDPA gets its keys in one piece for free: the cost of concatenating past and new is not counted against it.
        rows = slice(0, past + tokens)
        dense.append([x.contiguous() for x in (q.transpose(1, 2), cache_k[:, :, rows], cache_v[:, :, rows])])

    def ours(splits: int) -> dict[str, float]:
        size = torch.ops.ddtree.attention_workspace_bytes(calls[0][0], calls[0][3], mask.size(2), 0, scale, splits)
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")

        def run() -> None:
            for q, k, v, cache_k, cache_v, out in calls:
                torch.ops.ddtree.tree_attention(
                    q, k, v, cache_k, cache_v, slot, length, mask, 0, scale, out, workspace, splits
                )

        return milliseconds(run, sets)

    def sdpa() -> None:
        for q, k, v in dense:
            F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)

    mine, theirs = ours(0), {"gqa": milliseconds(sdpa, sets)}

    # The same with heads repeated beforehand, which opens kernels that know no groups: the faster of the two counts.
    wide = [(q, *(x.repeat_interleave(HQ // HKV, 1) for x in (k, v))) for q, k, v in dense]

    def sdpa_wide() -> None:
        for q, k, v in wide:
            F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    theirs["repeated"] = milliseconds(sdpa_wide, sets)
    row = {"tokens": tokens, "past": past, "sets": sets, **compared(tokens, past, mine, theirs, copy)}
    if past >= 4096 and tokens in (1, 65):
        row["ms_by_splits"] = {s: ours(s)["median"] for s in (4, 8, 16, 32, 48, 64) if s * 64 <= past}
    return row


def compaction() -> dict[str, Any]:
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
    n, length, width, tokens, calls = 1, 15, 64, 1 + budget, 20
    log_probs = torch.randn(n, length, width, device="cuda").log_softmax(-1).sort(-1, descending=True)[0].contiguous()
    integer = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device="cuda")  # noqa: E731
    candidates = torch.randint(0, 150_000, (n, length, width), dtype=torch.int32, device="cuda")
    ids, parents, depths, positions, path = (integer(n, tokens) for _ in range(5))
    weights = torch.zeros(n, tokens, dtype=torch.float64, device="cuda")
    counts, lengths, bonus, root, past = (integer(n) for _ in range(5))
    mask, choices = integer(n, tokens, -(-tokens // 32)), integer(n, tokens)
    build = lambda: [  # noqa: E731
        torch.ops.ddtree.build_tree(
            log_probs, candidates, root, None, past, ids, parents, depths, positions, weights, counts
        )
        for _ in range(calls)
    ]
    pack = lambda: [torch.ops.ddtree.packed_mask(parents, mask) for _ in range(calls)]  # noqa: E731
    walk = lambda: [  # noqa: E731
        torch.ops.ddtree.walk(parents, ids, choices, counts, None, path, lengths, bonus, None) for _ in range(calls)
    ]
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
