"""Offline runs by Ray Data: the parts as a dataset, and a pool of engines that maps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.data

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import EngineError
from ddtree_trt.replicas.cluster import check_room, connected, resources_per_replica
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.replicas.part_worker import PARTS_AT_A_TIME, PartWorker
from ddtree_trt.serve.options import ServeOptions


def answers_by_ray(
    engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions, todo: dict[int, str]
) -> Iterator[tuple[int, str]]:
    """Number and answers of each part, in the order in which they are finished. A part whose engine or machine is lost
    is given to another by Ray. Raises as `map_prompts` does."""
    backend = load_manifest(engine_dir).backend
    with connected() as started:
        if started:
            check_room(backend, replicas, options.tensor_parallel_size)
        cpus, gpus = resources_per_replica(backend, replicas, options.tensor_parallel_size)
        options = replace(options, threads=options.threads or max(1, int(cpus) // options.tensor_parallel_size))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # One part a block: a block is what Ray hands out, and computes again when it is lost.
        parts = ray.data.from_items(
            [{"number": number, "text": text} for number, text in todo.items()], override_num_blocks=len(todo)
        )
        pool = ray.data.ActorPoolStrategy(
            min_size=min(replicas.replicas, len(todo)),
            max_size=min(replicas.most, len(todo)),
            max_concurrent_calls_per_actor=PARTS_AT_A_TIME,
            max_tasks_in_flight_per_actor=PARTS_AT_A_TIME,
            enable_true_multi_threading=True,
        )
        answered = parts.map(
            _Mapped,  # type: ignore[arg-type]  # Ray calls its objects
            fn_constructor_args=(engine_dir, options),
            compute=pool,
            num_cpus=cpus,
            num_gpus=gpus,
        )
        try:
            for row in answered.iter_rows():
                yield row["number"], row["text"]
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineError(f"an engine failed: {reason}; the parts that are finished are kept") from error


class _Mapped:
    """What Ray makes in each process of the pool."""

    def __init__(self, engine_dir: Path, options: ServeOptions) -> None:
        self._worker = PartWorker(engine_dir, options)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"number": row["number"], "text": self._worker(row["text"])}
