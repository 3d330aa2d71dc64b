"""`ddtree-trt serve`: an OpenAI-compatible HTTP server."""

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
    TargetOngoingRequests,
    replica_options,
)
from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.params import check_device_rounds
from ddtree_trt.serve.options import ServeOptions

_D = ServeOptions


def serve(
    engine_dir: NewestByDefault = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")] = _D.host,
    port: Annotated[int, typer.Option(metavar="N", help="0 takes any free one and prints it.")] = _D.port,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model. Default: the engine's name.")
    ] = _D.model_name,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="DDTREE_API_KEY", help="What clients must send as a bearer token."),
    ] = _D.api_key,
    max_requests: Annotated[
        int, typer.Option(metavar="N", help="HTTP requests under way; more are answered 429.")
    ] = _D.max_requests,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", help="Sequences waiting for a slot; more are answered 429.")
    ] = _D.max_waiting,
    max_body_bytes: Annotated[
        int, typer.Option(metavar="N", help="Larger requests are answered 413.")
    ] = _D.max_body_bytes,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A request that takes longer is ended; 0: none is.")
    ] = _D.request_timeout_s,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A client that reads nothing for this long is cut off.")
    ] = _D.stall_timeout_s,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="After SIGTERM, how long requests under way may still take.")
    ] = _D.drain_timeout_s,
    default_max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="New tokens of a chat that states no limit. Default: the rest of the context."),
    ] = _D.default_max_tokens,
    device_rounds: DeviceRounds = _D.device_rounds,
    exact: Exact = _D.exact,
    tensor_parallel_size: TensorParallelSize = _D.tensor_parallel_size,
    threads: Threads = _D.threads,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A Jinja template in place of the engine's, such as one that takes tools."),
    ] = None,
    tool_parser: ToolParser = _D.tool_parser,
    reasoning_parser: ReasoningParser = _D.reasoning_parser,
    request_log: Annotated[
        bool, typer.Option(help="Log every request that ends: its tokens, times and tokens a round.")
    ] = _D.request_log,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every HTTP exchange.")] = _D.access_log,
    allowed_origins: Annotated[
        str,
        typer.Option(
            metavar="ORIGINS", help="Whose pages may call from browsers, comma-separated; * is any. Default: none."
        ),
    ] = _D.allowed_origins,
    playground: Annotated[
        bool, typer.Option("--playground", help="Also serve /playground, a page that draws each round's tree.")
    ] = _D.playground,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Publish /metrics under vLLM's names too.")
    ] = _D.vllm_metrics,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    target_ongoing_requests: TargetOngoingRequests = None,
    cpus_per_replica: CpusPerReplica = None,
    gpus_per_replica: GpusPerReplica = None,
) -> None:
    """Serve an engine over HTTP with OpenAI's API."""
    options = ServeOptions(
        host=host,
        port=port,
        model_name=served_model_name,
        api_key=api_key,
        max_requests=max_requests,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        stall_timeout_s=stall_timeout,
        drain_timeout_s=drain_timeout,
        default_max_tokens=default_max_tokens,
        device_rounds=check_device_rounds(device_rounds),
        exact=exact,
        tensor_parallel_size=tensor_parallel_size,
        threads=threads,
        chat_template=None if chat_template is None else _text(chat_template),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        request_log=request_log,
        access_log=access_log,
        allowed_origins=allowed_origins,
        playground=playground,
        vllm_metrics=vllm_metrics,
    )
    many = replica_options(replicas, cpus_per_replica, gpus_per_replica, max_replicas, target_ongoing_requests)
    directory = newest_engine() if engine_dir is None else engine_dir
    extra = "serve" if many is None else "ray"
    try:
        if many is None:
            from ddtree_trt.serve.server import serve_engine
        else:
            from ddtree_trt.replicas.process import serve_replicas
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ddtree_trt"):
            raise
        raise MissingDependency(f"the server needs the Python package {error.name}; {install_with(extra)}") from error
    if many is None:
        serve_engine(directory, options)
    else:
        serve_replicas(directory, options, many)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--chat-template {path} cannot be read ({reason}); give a Jinja template") from error
