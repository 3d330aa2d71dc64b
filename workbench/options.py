"""What the measurements have in common: their command lines, servers, and manifests of engines without directories.

Typer makes a command line of the signature of a module's `main`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import SCHEMA_VERSION, CheckpointIdentity, Limits, Manifest
from ddtree_trt.bench.settings import TINY
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import DDTreeError
from ddtree_trt.models.decoder import TransformerDims

Prompts = Annotated[list[str], typer.Option(help="as in ddtree-trt bench; repeatable")]
PROMPTS = [TINY]
Json = Annotated[Path | None, typer.Option("--json", help="write every figure there")]
_END_S = 120  # of a server
_NO_CHECKPOINT = CheckpointIdentity("none", "none", "")
Output = Annotated[Path, typer.Option("--output", "-o")]


def integers(text: str) -> tuple[int, ...]:
    """Those between commas."""
    return tuple(int(word) for word in text.split(",") if word)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(",") if word)


def print_row(cells: Iterable[object], *, head: bool = False) -> None:
    """A line of a table in Markdown, shown at once; behind the first one its rule."""
    line = "| " + " | ".join(map(str, cells)) + " |"
    print(line + ("\n" + "|---" * line.count(" | ") + "|---|" if head else ""), flush=True)


@contextmanager
def started_server(engine: str, *options: str) -> Iterator[str]:
    """The URL of a server of an engine on a free port of this machine, started with further options of `serve`; it
    ends with the block. What the server writes to stderr is shown. Raises DDTreeError where it does not start, or does
    not end with exit code 0."""
    command = [sys.executable, "-m", "ddtree_trt", "serve", engine, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            if not (ready := server.stdout.readline()):
                raise DDTreeError(f"ddtree-trt serve {engine} did not start; the line above says why")
            yield ready.split()[-1]  # the line ends with the address
            server.send_signal(signal.SIGTERM)
            if code := server.wait(_END_S):
                raise DDTreeError(f"the server ended with exit code {code}")
        finally:
            if server.poll() is None:
                server.kill()


def bare_manifest(
    name: str, target: TransformerDims, drafter: TransformerDims, limits: Limits, **others: Any
) -> Manifest:
    """Of a pair without checkpoints, files and stop tokens; for ONNX Runtime in fp32 where `others` do not say it."""
    fields: dict[str, Any] = {key: {} for key in ("chat_template_args", "toolchain", "tensors", "files")}
    fields |= {"backend": "onnxruntime", "precision": "fp32", "stop_token_ids": (), "build_seconds": 0.0} | others
    fields |= {"schema_version": SCHEMA_VERSION, "product_version": __version__, "name": name, "limits": limits}
    fields |= {"target": _NO_CHECKPOINT, "drafter": _NO_CHECKPOINT, "drafter_kind": kind_of(drafter).name}
    return Manifest(target_dims=target, drafter_dims=drafter, **fields)
