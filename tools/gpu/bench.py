"""Check and time the PyTorch engine on a GPU: correct answers first, then round times, in one JSON file.

    python -m tools.gpu.bench RESULT.json [--random-weights qwen3-8b,qwen3-4b] [--dry-run]

Full-size pairs are made at random on the device, whose rounds commit about a token: the times are those of a pair of
that shape, the text means nothing. tools/gpu_bench.sh builds the kernels first. --dry-run does all of it on a CPU with
tiny shapes, to check the script; its figures mean nothing.

Every part is run by itself: `steps` in the result says ok, or why it was skipped or failed. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.plugins.library import TORCH, find
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.weights import choose_device
from tools.gpu import correct, ranks
from tools.gpu.rounds import ceilings, fill, time_device, time_host
from workbench.random_pair import PairShape, find_shape, random_torch_engine

SCHEMA_VERSION = 1
# With its root each tree fills a size that passes are padded to: one node more would take the next size.
BUDGETS = [15, 31, 63, 127, 255]
DRY_BUDGETS = [3, 15]
COMPARED_BUDGET = 63
# Targets on an H200.
AR_OVER_FLOOR = 1.15
ROUND_OVER_AR = 1.40
GAP_US = 50.0


class Report:
    """The result, written after every step, so that an interrupted run leaves the steps before."""

    def __init__(self, path: Path, body: dict[str, Any], minutes: float) -> None:
        self.path = path
        self.body: dict[str, Any] = {**body, "steps": {}}
        self._began = time.monotonic()
        self._deadline = self._began + 60 * minutes

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; None when it failed or there was no time for it."""
        began = time.monotonic()
        if began > self._deadline:
            self.note(name, "skipped: out of time")
            return None
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            self.note(name, f"failed: {type(error).__name__}: {error}")
            return None
        self.note(name, f"ok, {time.monotonic() - began:.1f} s")
        return result

    def note(self, name: str, outcome: str) -> None:
        self.body["steps"][name] = outcome
        self.body["seconds"] = round(time.monotonic() - self._began, 1)
        self.path.write_text(json.dumps(self.body, indent=1) + "\n")
        print(f"[{self.body['seconds']:6.1f} s] {name}: {outcome}", flush=True)

    @property
    def failed(self) -> bool:
        return any(outcome.startswith("failed") for outcome in self.body["steps"].values())


def machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": str(find(TORCH).name) if on_gpu else None,
        "product": __version__,
    }


def measure_pair(name: str, args: argparse.Namespace, device: torch.device, report: Report) -> dict[str, Any]:
    """Every round time of one shape."""
    shape = find_shape(name)
    room = (args.rounds + 8) * shape.block_size
    limits = Limits(
        max_seq_len=max(args.pasts) + room,
        max_batch=1,
        max_tree_budget=max([*args.budgets, shape.block_size]),
        prefill_chunk=min(1024, max(args.pasts)),
    )
    result: dict[str, Any] = {"shape": name, "precision": args.precision, "runs": []}
    made = report.step(
        f"{name}: weights", lambda: random_torch_engine(name, shape, args.precision, limits, device, args.seed)
    )
    if made is None:
        return result
    engine, weights = made
    result["weight_bytes"] = streamed_bytes(weights)
    slab = engine.target.cache.slab
    result["kv_bytes_per_token"] = slab[:, 0, :, 0].numel() * slab.element_size()
    for past in args.pasts:
        result["runs"].append(measure_past(name, shape, engine, past, args, report))
    engine.close()
    return result


def streamed_bytes(weights: dict[str, Tensor]) -> int:
    """Bytes of target weights that one token needs: all but the embedding, unless that is the head too."""
    target = {n: w for n, w in weights.items() if n.startswith("target.")}
    if "target.head" in target:
        del target["target.embedding"]
    return sum(w.numel() * w.element_size() for w in target.values())


def measure_past(
    name: str,
    shape: PairShape,
    engine: TorchEngine,
    past: int,
    args: argparse.Namespace,
    report: Report,
) -> dict[str, Any]:
    run: dict[str, Any] = {"past": past, "ddtree": []}
    where, rounds = f"{name}, past {past}", args.rounds
    tokens = np.random.default_rng(args.seed).integers(0, shape.target.vocab_size - 1, past)
    bonus = report.step(f"{where}: prefill", lambda: fill(engine, tokens))
    if bonus is None:
        return run

    def host(budget: int, **kind: bool) -> Callable[[], dict[str, Any]]:
        return lambda: time_host(engine, bonus, budget=budget, rounds=rounds, **kind)

    def on_device(budget: int) -> Callable[[], dict[str, Any]]:
        return lambda: time_device(engine, bonus, budget=budget, rounds=rounds)

    run["ar"] = report.step(f"{where}: ar", host(0))
    run["dflash"] = report.step(f"{where}: dflash", host(shape.block_size - 1, dflash=True))
    for budget in args.budgets:
        run["ddtree"].append(
            {
                "budget": budget,
                "host": report.step(f"{where}: ddtree {budget}, tree on the host", host(budget)),
                "device": report.step(f"{where}: ddtree {budget}, tree on the device", on_device(budget)),
            }
        )
    return run


def kernel_check(path: Path) -> dict[str, Any]:
    """The report of the kernels' own check. Raises AssertionError when a part of it failed."""
    found = json.loads(path.read_text())
    bad = [name for name, part in found.items() if not part["ok"]]
    assert not bad, f"{', '.join(bad)}: see {path}"
    return found


def pointwise(device: torch.device) -> dict[str, float] | None:
    """Errors of the kernels between matrix products; None on a CPU, which has no such kernels."""
    return correct.check_pointwise(device) if device.type == "cuda" else None


def targets(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with the figure found, for every shape and past."""
    rows: list[dict[str, Any]] = []

    def add(where: str, what: str, found: float, wanted: float) -> None:
        rows.append({"where": where, "what": what, "found": found, "wanted": wanted, "met": found <= wanted})

    copy = (body.get("ceilings") or {}).get("copy_gb_per_s")
    for pair in body["pairs"]:
        for run in pair["runs"]:
            where, ar = f"{pair['shape']}, past {run['past']}", run.get("ar")
            step_ms = ar["round_ms"]["median"] if ar else None
            if step_ms and copy:
                floor_ms = (pair["weight_bytes"] + run["past"] * pair["kv_bytes_per_token"]) / copy / 1e6
                add(where, "ar step over the time to read weights and cache", step_ms / floor_ms, AR_OVER_FLOOR)
            rounds = {row["budget"]: row for row in run["ddtree"]}
            row = rounds.get(min(COMPARED_BUDGET, max(rounds, default=0)), {})
            device = row.get("device")
            if device and step_ms:
                add(where, "ddtree round over ar step", device["round_ms"] / step_ms, ROUND_OVER_AR)
            if device:
                add(where, "gap between rounds the host sees, us", device["gap_us"], GAP_US)
    return rows


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--random-weights", metavar="SHAPES", default="qwen3-8b,qwen3-4b")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16", help="of the round times")
    parser.add_argument("--pasts", type=numbers, default=[1024, 8192])
    parser.add_argument("--budgets", type=numbers, default=BUDGETS)
    parser.add_argument("--rounds", type=int, default=20, help="timed for each figure")
    parser.add_argument("--kernel-check", type=Path, help="what tools.gpu.kernel_check found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins after this")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        args.random_weights, args.pasts, args.budgets, args.rounds = "micro", [16, 40], DRY_BUDGETS, 2
    device = torch.device("cpu") if args.dry_run else choose_device()
    if device.type == "cpu" and not args.dry_run:
        raise UsageError("no GPU was found; --dry-run checks this script without one")
    shapes = args.random_weights.split(",")
    for name in shapes:
        find_shape(name)
    if args.dry_run:
        torch.set_num_threads(1)
    args.result.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema_version": SCHEMA_VERSION, "dry_run": args.dry_run, "machine": machine(device)}
    body |= {"correctness": {}, "ceilings": None, "pairs": [], "targets": []}
    report = Report(args.result, body, args.minutes)
    if args.kernel_check is not None:
        report.body["kernels"] = report.step("kernels", lambda: kernel_check(args.kernel_check))
    report.body["pointwise"] = report.step("norms, rotary, swiglu", lambda: pointwise(device))
    with tempfile.TemporaryDirectory() as folder:
        size = (1, 12) if args.dry_run else (6, 96)
        for precision in ["fp32", "bf16"] if args.dry_run else ["bf16", "fp16", "fp32"]:
            report.body["correctness"][precision] = report.step(
                f"correctness in {precision}",
                partial(correct.check, Path(folder), precision, device, *size),
            )
        if (reason := ranks.obstacle(dry_run=args.dry_run)) is not None:
            report.note("two GPUs", f"skipped: {reason}")
        else:
            precision = "fp32" if args.dry_run else "bf16"
            report.body["two_gpus"] = report.step("two GPUs", partial(ranks.check, Path(folder), precision, *size))
    report.body["ceilings"] = report.step("ceilings", lambda: ceilings(device))
    for name in shapes:
        report.body["pairs"].append(measure_pair(name, args, device, report))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.body["targets"] = report.step("targets", lambda: targets(report.body)) or []
    report.note("end", "ok")
    for row in report.body["targets"]:
        print(f"{row['where']}: {row['what']}: {row['found']:.2f} (wanted {row['wanted']}): {row['met']}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except DDTreeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
