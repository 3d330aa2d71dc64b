"""Check a target that is split over two GPUs against float32 in one process, for `bench.py`.

    python -m tools.gpu.ranks RESULT.json [--dry-run]

Without --dry-run it needs two GPUs. --dry-run takes two processes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.options import EngineOptions
from tools.gpu.correct import BUDGETS, RELATIVE_ERROR, compare_trees, differ_at_a_tie, open_tiny, prompts
from tools.gpu.rounds import HostRounds, fill

RANKS = 2


def obstacle(*, dry_run: bool) -> str | None:
    """Why nothing can be checked here; None where it can."""
    count = torch.cuda.device_count()
    return None if dry_run or count >= RANKS else f"{count} GPUs, {RANKS} are needed"


def check(folder: Path, precision: str, count: int, tokens: int) -> dict[str, Any]:
    """As `correct.check`, for the packaged pair over two ranks: logits of branching trees, and `tokens` tokens after
    `count` prompts, decoded by trees, compared with those decoded one by one in one process. Raises AssertionError that
    says what differs."""
    cpu = torch.device("cpu")
    truth = open_tiny(folder, "fp32", cpu)
    one = open_tiny(folder, precision, torch.device("cuda", 0) if torch.cuda.device_count() >= RANKS else cpu)
    directory = folder / f"tiny-{precision}"
    two = ParallelEngine.open(directory, load_manifest(directory), EngineOptions(tensor_parallel_size=RANKS))
    try:
        error = compare_trees(truth, two)
        assert error <= RELATIVE_ERROR[precision], f"logits are off by {error:.3g} of their scale"
        outputs, ties = 0, 0
        for prompt in prompts(count):
            expected = HostRounds(one, budget=0).decode(fill(one, prompt), tokens)[:tokens]
            for budget in (0, *BUDGETS):
                found = HostRounds(two, budget=budget).decode(fill(two, prompt), tokens)[:tokens]
                outputs += 1
                ties += differ_at_a_tie(truth, prompt, expected, found, precision, f"budget {budget}")
        return {"relative_error": error, "outputs": outputs, "differ_at_a_tie": ties}
    finally:
        two.close()
        one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if (reason := obstacle(dry_run=args.dry_run)) is not None:
        raise SystemExit(f"nothing was checked: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        found = check(Path(folder), "fp32", *(1, 12) if args.dry_run else (6, 96))
    args.result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
