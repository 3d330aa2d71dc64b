"""`ddtree-trt profile`: measure the latencies of drafts and verifications on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.commands.options.common import AsJson, EngineDirectory, Exact, TensorParallelSize, Threads
from ddtree_trt.terminal import printing as terminal

if TYPE_CHECKING:
    from ddtree_trt.runtime.decoding.budget.latency import LatencyProfile


def profile(
    engine_dir: EngineDirectory,
    threads: Threads = 0,
    exact: Exact = None,
    tensor_parallel_size: TensorParallelSize = 1,
    json: AsJson = False,
) -> None:
    """Measure an engine's latencies on this machine again.

    They are stored with the engine; automatic budgets choose by them.
    """
    with terminal.progress_bars() as progress:
        measured = measure_engine(
            engine_dir, progress, threads=threads, exact=exact, tensor_parallel_size=tensor_parallel_size
        )
    if json:
        terminal.print_json(dataclasses.asdict(measured))
    else:
        terminal.print_profile(measured)


def measure_engine(
    engine_dir: Path,
    progress: Progress,
    *,
    threads: int = 0,
    exact: bool | None = None,
    tensor_parallel_size: int = 1,
) -> LatencyProfile:
    """Load the engine, measure it, and store the profile in its directory."""
    from ddtree_trt.runtime.decoding.budget.latency import measure_and_store
    from ddtree_trt.runtime.engines.load import open_engine

    engine = open_engine(engine_dir, threads=threads, exact=exact, tensor_parallel_size=tensor_parallel_size)
    try:
        return measure_and_store(engine_dir, engine, progress)
    finally:
        engine.close()
