"""`ddtree-trt serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.commands.arguments import NewestByDefault, read_file, with_options
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.serve.options import ServeOptions


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
            from ddtree_trt.replicas.process import serve_replicas
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
