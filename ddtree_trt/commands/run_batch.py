"""`ddtree-trt run-batch`: the answers to a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.commands.arguments import NewestByDefault, with_options
from ddtree_trt.commands.serve import needing
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.serve.options import ANSWER_OPTIONS, ServeOptions


@with_options(options=ANSWER_OPTIONS, replicas=("replicas", "max_replicas", "cpus_per_replica", "gpus_per_replica"))
def run_batch(
    options: ServeOptions,
    replicas: ReplicaOptions | None,
    engine_dir: NewestByDefault = None,
    *,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", metavar="FILE", help="JSON lines: requests of the server's API.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", metavar="FILE", help="JSON lines: an answer for each request.")
    ],
    seed: Annotated[int, typer.Option(metavar="N", help="From it follow the seeds of requests that state none.")] = 0,
) -> None:
    """Answer a file of requests, each once. Interrupted, the same command goes on where it was."""
    directory = newest_engine() if engine_dir is None else engine_dir
    from ddtree_trt.terminal import printing as terminal

    with needing("serve" if replicas is None else "ray"):
        from ddtree_trt.replicas.offline import map_prompts

        with terminal.progress_bars() as progress:
            result = map_prompts(
                directory, input_file, output_file, options=options, replicas=replicas, seed=seed, progress=progress
            )
    earlier = f" ({result.resumed} by an earlier run)" if result.resumed else ""
    print(f"{output_file}: {result.rows} answers{earlier}, {result.refused} refused, {result.completion_tokens} tokens")
