"""`ddtree-trt serve`: an OpenAI-compatible HTTP server; `run-batch`: the answers to a file of requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.commands.arguments import NewestByDefault, read_file, with_options
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.serve.options import ANSWER_OPTIONS, ReplicaOptions, ServeOptions


@with_options()
def serve(
    options: ServeOptions,
    replicas: ReplicaOptions | None,
    engine_dir: NewestByDefault = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A Jinja template in place of the engine's, such as one that takes tools."),
    ] = None,
) -> None:
    """Serve an engine over HTTP with OpenAI's API."""
    if chat_template is not None:
        options = replace(options, chat_template=read_file("--chat-template", chat_template, "give a Jinja template"))
    directory = newest_engine() if engine_dir is None else engine_dir
    with needing("serve" if replicas is None else "ray"):
        if replicas is None:
            from ddtree_trt.serve.server import serve_engine
        else:
            from ddtree_trt.replicas.deployment import serve_replicas
    if replicas is None:
        serve_engine(directory, options)
    else:
        serve_replicas(directory, options, replicas)


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise MissingDependency for a package of the extra that the block imports and does not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ddtree_trt"):
            raise
        raise MissingDependency(f"this needs the Python package {error.name}; {install_with(extra)}") from error


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
