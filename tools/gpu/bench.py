"""Check and time the PyTorch engine on a GPU: correct answers first, then round times, in one JSON file.

    python -m tools.gpu.bench RESULT.json [--random-weights qwen3-8b,qwen3-4b] [--dry-run]

Full-size pairs are made at random on the device, whose rounds commit about a token: the times are those of a pair of
that shape, the text means nothing. tools/gpu_bench.sh builds the kernels first. --dry-run does all of it on a CPU with
tiny shapes, to check the script; its figures mean nothing.

Every part is run by itself: `steps` in the result says ok, or why it was skipped or failed. Exits 1 if any failed.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.bench.measure import Session, engine_runs, measure
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.plugins.library import TORCH, find
from ddtree_trt.runtime.engines import profile
from ddtree_trt.runtime.engines.torch.weights import choose_device
from tools.gpu import correct
from tools.gpu.rounds import ceilings, fill, time_batches, time_device, time_host, time_steps
from workbench.random_pair import find_shape, random_torch_engine

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Scale:
    """How much is checked and timed."""

    pasts: tuple[int, ...]
    budgets: tuple[int, ...]
    rounds: int  # timed for each figure
    precisions: tuple[str, ...]
    prompts: int
    tokens: int
    slots: int  # of batches
    batch_past: int


# With its root each tree fills a size that passes are padded to: one node more would take the next size.
FULL = Scale((1024, 8192), (15, 31, 63, 127, 255), 20, ("bf16", "fp16", "fp32"), 6, 96, 64, 512)
DRY = Scale((16, 40), (3, 15), 2, ("fp32",), 1, 12, 2, 16)
COMPARED_BUDGET = 63
# Targets on an H200.
AR_OVER_FLOOR = 1.15
ROUND_OVER_AR = 1.40
GAP_US = 50.0
# Goals on an H100.
ROUND_MS = 9.3  # of the shape GOAL with COMPARED_BUDGET nodes behind the shorter past
GOAL = "qwen3-8b"
BEST_OVER_AUTO = 1.03  # tokens per second of the best fixed budget over those of automatic ones, of the packaged pair
STEP_OVER_GRAPHS = 1.25  # with all slots


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


def measure_pair(name: str, scale: Scale, device: torch.device, report: Report) -> dict[str, Any]:
    """Every round time of one shape."""
    shape = find_shape(name)
    limits = Limits(
        max_seq_len=max(scale.pasts) + (scale.rounds + 8) * shape.block_size,
        max_batch=1,
        max_tree_budget=max([*scale.budgets, shape.block_size]),
        prefill_chunk=min(1024, max(scale.pasts)),
    )
    result: dict[str, Any] = {"shape": name, "precision": "bf16", "runs": []}
    made = report.step(f"{name}: weights", lambda: random_torch_engine(name, shape, "bf16", limits, device, 0))
    if made is None:
        return result
    engine, weights = made
    slab = engine.target.cache.slab
    # What one token needs of the target: all but the embedding, unless that is the head too.
    needed = [w for n, w in weights.items() if n.startswith("target.") and n != "target.embedding"]
    needed += [] if "target.head" in weights else [weights["target.embedding"]]
    result["weight_bytes"] = sum(w.numel() * w.element_size() for w in needed)
    result["kv_bytes_per_token"] = slab[:, 0, :, 0].numel() * slab.element_size()
    for past in scale.pasts:
        tokens = np.random.default_rng(0).integers(0, shape.target.vocab_size - 1, past)
        bonus = report.step(f"{name}, past {past}: prefill", partial(fill, engine, tokens))
        run: dict[str, Any] = {"past": past, "ddtree": []}
        result["runs"].append(run)
        if bonus is None:
            continue

        def timed(what: str, time_one: Callable[..., Any], budget: int, **kind: bool) -> Any:
            work = partial(time_one, engine, bonus, budget=budget, rounds=scale.rounds, **kind)  # noqa: B023
            return report.step(f"{name}, past {past}: {what}", work)  # noqa: B023

        run["ar"] = timed("ar", time_host, 0)
        run["dflash"] = timed("dflash", time_host, shape.block_size - 1, dflash=True)
        for budget in scale.budgets:
            host = timed(f"ddtree {budget}, tree on the host", time_host, budget)
            on_device = None
            if engine.rounds is not None:
                on_device = timed(f"ddtree {budget}, tree on the device", time_device, budget)
            run["ddtree"].append({"budget": budget, "host": host, "device": on_device})
    engine.close()
    return result


def measure_batches(name: str, scale: Scale, device: torch.device, report: Report) -> dict[str, Any]:
    """Rounds of many slots of one shape, and steps of the scheduler over all of them."""
    shape, slots, past = find_shape(name), scale.slots, scale.batch_past
    length = past + (scale.rounds + 8) * shape.block_size
    limits = Limits(max_seq_len=length, max_batch=slots, max_tree_budget=63, prefill_chunk=min(256, past))
    result: dict[str, Any] = {"shape": name, "past": past, "steps": {}}
    made = report.step(f"{name}: {slots} slots", lambda: random_torch_engine(name, shape, "bf16", limits, device, 0))
    if made is None:
        return result
    engine, _ = made
    if engine.rounds is not None:
        report.step(f"{name}: capture", engine.warm_up)
        rounds = partial(time_batches, engine, past, scale.rounds)
        result["rounds"] = report.step(f"{name}: rounds of up to {slots} slots", rounds)
        for method, params in (("ar", {"method": "ar"}), ("ddtree", {"tree_budget": 3})):
            work = partial(time_steps, engine, slots, scale.rounds, **params)
            result["steps"][method] = report.step(f"{name}: steps of {slots} slots, {method}", work)
    engine.close()
    return result


def tokens_per_second(folder: Path, scale: Scale) -> dict[str, float]:
    """Of the packaged pair by every case of `ddtree-trt bench`, one request at a time."""
    directory = folder / f"tiny-{scale.precisions[0]}"
    budgets: tuple[Any, ...] = ("auto", *(1 << bits for bits in range(2, 7 if scale is FULL else 3)))
    settings = BenchSettings(str(directory), budgets=budgets, limit=scale.prompts, max_tokens=2 * scale.tokens)
    settings = replace(settings, device_rounds="on")
    with closing(Session(directory, settings)) as session:
        samples = measure(session, settings, engine_runs(session, settings)).samples
    spent, tokens = defaultdict[str, float](float), Counter[str]()
    for s in samples:
        spent[s.case] += s.outcome.decode_s
        tokens[s.case] += s.outcome.output_tokens
    return {case: tokens[case] / spent[case] for case in tokens}


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
            if device and pair["shape"] == GOAL and run is pair["runs"][0]:
                add(where, "ddtree round, ms", device["round_ms"], ROUND_MS)
    for batch in body.get("batches", []):
        for method, step in batch["steps"].items():
            if step:
                where = f"{batch['shape']}, {step['slots']} slots, {method}"
                add(where, "step over its graphs", step["step_ms"] / step["graphs_ms"], STEP_OVER_GRAPHS)
    if speeds := body.get("tokens_per_second"):
        best = max(speed for case, speed in speeds.items() if "@auto" not in case)
        add("the packaged pair", "best fixed budget over auto", best / speeds["ddtree@auto+device"], BEST_OVER_AUTO)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--random-weights", metavar="SHAPES", default="qwen3-8b,qwen3-4b")
    parser.add_argument("--kernel-check", type=Path, help="what tools.gpu.kernel_check found")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins after this")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    device, scale, shapes = choose_device(), FULL, args.random_weights.split(",")
    if args.dry_run:
        device, scale, shapes = torch.device("cpu"), DRY, ["micro"]
        torch.set_num_threads(1)
        profile.SECONDS = 0.0  # costs are measured once, not for seconds
    elif device.type == "cpu":
        raise UsageError("no GPU was found; --dry-run checks this script without one")
    for name in shapes:
        find_shape(name)
    args.result.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema_version": SCHEMA_VERSION, "dry_run": args.dry_run, "machine": machine(device)}
    body |= {"correctness": {}, "ceilings": None, "pairs": [], "targets": []}
    report = Report(args.result, body, args.minutes)
    body = report.body
    if args.kernel_check is not None:
        body["kernels"] = found = json.loads(args.kernel_check.read_text())
        bad = ", ".join(name for name, part in found.items() if not part["ok"])
        report.note("kernels", f"failed: {bad}" if bad else "ok")
    if device.type == "cuda":
        body["pointwise"] = report.step("norms, rotary, swiglu", lambda: correct.check_pointwise(device))
        body["products"] = report.step("products", lambda: correct.check_products(device))
    with tempfile.TemporaryDirectory() as folder:
        check = partial(correct.check, Path(folder), device=device, count=scale.prompts, tokens=scale.tokens)
        for precision in scale.precisions:
            work = partial(check, precision)
            body["correctness"][precision] = report.step(f"correctness in {precision}", work)
        if torch.cuda.device_count() < 2:
            report.note("two GPUs", "skipped: there are fewer")
        else:
            body["two_gpus"] = report.step("two GPUs", partial(check, scale.precisions[0], ranks=2))
        work = partial(tokens_per_second, Path(folder), scale)
        body["tokens_per_second"] = report.step("tokens per second", work)
    body["ceilings"] = report.step("ceilings", lambda: ceilings(device))
    for name in shapes:
        body["pairs"].append(measure_pair(name, scale, device, report))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    body["batches"] = [measure_batches(shapes[0], scale, device, report)]
    body["targets"] = report.step("targets", lambda: targets(body)) or []
    report.note("end", "ok")
    for row in body["targets"]:
        print(f"{row['where']}: {row['what']}: {row['found']:.2f} (wanted {row['wanted']}): {row['met']}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except DDTreeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
