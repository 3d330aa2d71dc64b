"""`ddtree-trt run-batch`: the answers to a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.commands.options.chats import ReasoningParser, ToolParser
from ddtree_trt.commands.options.common import DeviceRounds, Exact, NewestByDefault, TensorParallelSize, Threads
from ddtree_trt.commands.options.replicas import (
    CpusPerReplica,
    GpusPerReplica,
    MaxReplicas,
    Replicas,
    replica_options,
)
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.runtime.params import check_device_rounds
from ddtree_trt.serve.options import ServeOptions


def run_batch(
    engine_dir: NewestByDefault = None,
    *,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", metavar="FILE", help="JSON lines: requests of the server's API.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", metavar="FILE", help="JSON lines: an answer for each request.")
    ],
    seed: Annotated[int, typer.Option(metavar="N", help="From it follow the seeds of requests that state none.")] = 0,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call the model. Default: the engine's name.")
    ] = ServeOptions.model_name,
    device_rounds: DeviceRounds = ServeOptions.device_rounds,
    exact: Exact = ServeOptions.exact,
    tensor_parallel_size: TensorParallelSize = ServeOptions.tensor_parallel_size,
    threads: Threads = ServeOptions.threads,
    tool_parser: ToolParser = ServeOptions.tool_parser,
    reasoning_parser: ReasoningParser = ServeOptions.reasoning_parser,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    cpus_per_replica: CpusPerReplica = None,
    gpus_per_replica: GpusPerReplica = None,
) -> None:
    """Answer a file of requests, each once. Interrupted, the same command goes on where it was."""
    options = ServeOptions(
        model_name=served_model_name,
        device_rounds=check_device_rounds(device_rounds),
        exact=exact,
        tensor_parallel_size=tensor_parallel_size,
        threads=threads,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    many = replica_options(replicas, cpus_per_replica, gpus_per_replica, max_replicas)
    directory = newest_engine() if engine_dir is None else engine_dir
    from ddtree_trt.terminal import printing as terminal

    try:
        from ddtree_trt.replicas.offline import map_prompts

        with terminal.progress_bars() as progress:
            result = map_prompts(
                directory, input_file, output_file, options=options, replicas=many, seed=seed, progress=progress
            )
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ddtree_trt"):
            raise
        extra = "serve" if many is None else "ray"
        raise MissingDependency(f"this needs the Python package {error.name}; {install_with(extra)}") from error
    earlier = f" ({result.resumed} by an earlier run)" if result.resumed else ""
    print(f"{output_file}: {result.rows} answers{earlier}, {result.refused} refused, {result.completion_tokens} tokens")
