"""Engines behind Ray's proxies: the application of Ray Serve, and `ddtree-trt serve --replicas`, which deploys it on a
cluster and removes it when a signal ends it.

`serve run ddtree_trt.replicas.deployment:app engine_dir=/path/to/engine replicas=2` deploys it with Ray's own command.
"""

import asyncio
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ConfigDict, TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_trt import errors
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.device.cpu import usable_cores
from ddtree_trt.errors import DDTreeError, EngineError, UsageError, told
from ddtree_trt.serve.app import open_app
from ddtree_trt.serve.limits import with_origins
from ddtree_trt.serve.metrics import show_requests
from ddtree_trt.serve.options import ReplicaOptions, ServeOptions
from ddtree_trt.serve.server import listen

_CONNECT_S = 20.0  # timeout for a cluster's address: Ray itself tries for minutes


@contextmanager
def starting(what: str) -> Iterator[None]:
    """The block starts `what`. Raises EngineError where Ray fails in it."""
    try:
        yield
    except DDTreeError:
        raise
    except Exception as error:
        logs = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
        advice = f"end what else keeps this machine busy and try again, else see {logs}"
        raise EngineError(f"{what} did not start ({told(error)}); {advice}") from error


@contextmanager
def connected() -> Iterator[bool]:
    """Connect to the cluster of RAY_ADDRESS or one on this machine; else, and for `local`, start one that ends with the
    block. Yields whether it was started. Raises UsageError when nothing answers, EngineError when Ray fails."""
    if ray.is_initialized():
        yield False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = os.environ.get("RAY_ADDRESS", "")
    with starting("Ray"):
        if address != "local":
            try:
                if address not in ("", "auto"):
                    host, _, port = address.removeprefix("ray://").rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
                ray.init(address=address or "auto", logging_level=logging.WARNING)
            except (OSError, ValueError) as error:  # ConnectionError is an OSError
                if address:
                    raise UsageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
        if started := not ray.is_initialized():
            bound = cores if (cores := usable_cores()) < (os.cpu_count() or 1) else None  # which Ray does not look at
            ray.init(address="local", num_cpus=bound, include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield started
    finally:
        ray.shutdown()


def resources_per_replica(
    backend: str, replicas: ReplicaOptions, ranks: int = 1, *, check: bool = False
) -> tuple[float, float]:
    """CPUs and GPUs of each replica, as given, else by what the cluster has now. `ranks`: processes of an engine. With
    `check`, for a cluster that does not grow, raises UsageError where there is no room for them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    gpus, place = replicas.gpus_per_replica, BACKENDS[backend].place
    if gpus is None:
        gpus = float(ranks) if place == "GPU" or (place == "device" and total["GPU"]) else 0.0
    cpus = replicas.cpus_per_replica
    if cpus is None:
        cpus = min(total["CPU"] / replicas.most, max(node.get("CPU", 0.0) for node in nodes))
        cpus = float(int(cpus)) if cpus >= 1 else cpus  # Ray takes fractions below 1 only
    for kind, each in (("CPU", cpus), ("GPU", gpus)):
        if check and each * replicas.most > total[kind]:
            raise UsageError(
                f"{replicas.most} replicas of {each:g} {kind}s need {each * replicas.most:g}, and this machine has "
                f"{total[kind]:g}; have fewer, lower --{kind.lower()}s-per-replica, or join machines to a Ray cluster"
            )
    return cpus, gpus


def threads_of(options: ServeOptions, cpus: float) -> int:
    return options.threads or max(1, int(cpus) // options.ranks)


# Requests with one `X-Session-Id` go to one engine while it has room, then to the next; the others to any.
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_STOP_POLL_S = 0.5  # how often a replica that ends looks whether its requests have finished
_SEND_ERRORS_S = 5.0  # after a drain, for the errors of requests that it ended
_PAGE_S = 5.0  # timeout for the figures of the other replicas
_RAYS_OWN = ("host", "port", "stall_timeout_s")  # Ray's proxies have the sockets


class Engine:
    """A Ray Serve deployment: one engine with the server's application, whose metrics page is that of all of them."""

    def __init__(self, engine_dir: Path, options: ServeOptions) -> None:
        if options.request_log:
            show_requests()
        self._llm, self._gate = open_app(engine_dir, options, metrics_page=self._pages)
        self._app = _without_request_id(with_origins(self._gate, options))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        if self._llm.failure is not None:
            raise RuntimeError(str(self._llm.failure))

    async def page(self) -> tuple[str, str]:
        """This replica's name and its own metrics page."""
        return serve.get_replica_context().replica_id.unique_id, self._gate.metrics.page().decode()

    async def _pages(self) -> bytes:
        context = serve.get_replica_context()
        all_of_them = serve.get_deployment_handle(context.deployment, context.app_name)
        pages = all_of_them.broadcast("page").results_async(return_exceptions=True)
        return merged_page([p for p in await asyncio.wait_for(pages, _PAGE_S) if isinstance(p, tuple)])

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until those open have finished. After `timeout_s`, end the rest."""
        await self._gate.drain(timeout_s)

    async def end_all(self) -> None:
        self._gate.end_all()


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """The application without its own X-Request-Id: Ray adds one to every answer, which its logs have."""

    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if headers := message.get("headers"):
                message["headers"] = [h for h in headers if h[0].lower() != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_on)

    return without


def merged_page(pages: Sequence[tuple[str, str]]) -> bytes:
    """The page of all replicas, of the name of each and its own page. Samples have a label that names their replica."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [s._replace(labels={"replica": replica, **s.labels}) for s in family.samples]
    registry: Any = SimpleNamespace(collect=families.values)
    return generate_latest(registry)


def application(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> Application:
    """The application, to be run on the Ray cluster that this process is connected to, with the engine at the same path
    on every machine. The `options` that are Ray's are not read. Raises ArtifactError when there is no engine."""
    engine_dir = engine_dir.resolve()
    manifest = load_manifest(engine_dir)
    slots = manifest.limits.max_batch
    cpus, gpus = resources_per_replica(manifest.backend, replicas, options.ranks)
    scale: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.most > replicas.replicas:
        target = replicas.target_ongoing_requests or slots
        bounds = {"min_replicas": replicas.replicas, "max_replicas": replicas.most}
        scale = {"autoscaling_config": {**bounds, "target_ongoing_requests": target}}
    engines = serve.deployment(
        name="Engine",
        **scale,
        # What engines log is for the terminal, which the controller of `serve --replicas` keeps from its own.
        ray_actor_options={
            "num_cpus": cpus,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": {"RAY_SERVE_LOG_TO_STDERR": "1"}},
        },
        # Half the slots more than run, so that the next is there when one ends. The others wait for whichever engine
        # has room first.
        max_ongoing_requests=slots + math.ceil(slots / 2),
        max_queued_requests=max(1, options.max_waiting),
        max_constructor_retry_count=1,  # what keeps the first engine from being opened will keep the others
        request_router_config={
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"num_fallback_replicas": replicas.most},
        },
        graceful_shutdown_wait_loop_s=_STOP_POLL_S,
        graceful_shutdown_timeout_s=options.drain_timeout_s + _SEND_ERRORS_S,
        logging_config=log_settings(options),
    )(serve.ingress()(Engine))
    return engines.bind(engine_dir, replace(options, threads=threads_of(options, cpus)))


def log_settings(options: ServeOptions) -> LoggingConfig:
    """Ray's access log is at the level below warnings."""
    return LoggingConfig(log_level="INFO" if options.access_log else "WARNING", enable_access_log=options.access_log)


@dataclass(frozen=True, kw_only=True)
class _Arguments(ReplicaOptions, ServeOptions):
    __pydantic_config__ = ConfigDict(extra="forbid")
    engine_dir: Path


def app(arguments: dict[str, Any]) -> Application:
    """The application by Ray's own commands and configuration files: `engine_dir`, and any field of ServeOptions and
    ReplicaOptions, whose values may be texts, but those that are Ray's. Raises UsageError."""
    try:
        if rays := [name for name in _RAYS_OWN if name in arguments]:
            raise UsageError(f"{rays[0]} is Ray's: its proxies have the sockets")
        given = TypeAdapter(_Arguments).validate_python(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    kinds: tuple[Any, ...] = (ServeOptions, ReplicaOptions)
    made = [kind(**{f.name: getattr(given, f.name) for f in fields(kind)}) for kind in kinds]
    return application(given.engine_dir, *made)


APPLICATION = "ddtree-trt"
# Of Ray's controller and the proxies that it starts. A busy machine takes longer for a proxy than the 5 s after which
# Ray kills it; and an engine that fails is a page of tracebacks on the terminal, which `_run` says in one line.
_CONTROLLER = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_LOG_TO_STDERR": "0"}


def serve_replicas(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> None:
    """Serve an engine by replicas until SIGTERM or SIGINT ends it. Prints one line when it is ready.

    Raises ArtifactError when there is no engine, the first engine's own error when it cannot be opened, EngineError
    when Ray or the replicas do not start, UsageError when the address cannot be used, the machine has no room, or Ray
    Serve runs on the cluster already.
    """
    manifest = load_manifest(engine_dir)
    if options.stall_timeout_s != ServeOptions.stall_timeout_s:
        raise UsageError("--stall-timeout cannot be had with --replicas: Ray's proxy has the connections; leave it out")
    with listen(options) as listener:  # that the address can be used, and which port 0 stands for
        port = listener.getsockname()[1]
    with connected() as started:
        cpus, gpus = resources_per_replica(manifest.backend, replicas, options.ranks, check=started)
        if not started and serve.status().applications:
            raise UsageError(
                "Ray Serve runs applications on this cluster already; deploy beside them with: "
                f"serve run ddtree_trt.replicas.deployment:app engine_dir={engine_dir.resolve()}"
            )
        try:
            with starting("Ray Serve"):
                serve.start(
                    http_options={"host": options.host, "port": port},
                    logging_config=log_settings(options),
                    controller_options={
                        "runtime_env": {"env_vars": {name: os.environ.get(name, v) for name, v in _CONTROLLER.items()}}
                    },
                )
            engines = _run(engine_dir, options, replicas)
            count = f"{replicas.replicas}" + f" to {replicas.most}" * (replicas.most > replicas.replicas)
            each = f"{manifest.limits.max_batch} slots, {cpus:g} CPUs" + f", {gpus:g} GPUs" * bool(gpus)
            host = f"[{options.host}]" if ":" in options.host else options.host
            name = options.model_name or manifest.name
            ready = f"serving {name} ({count} replicas of {each}, by Ray) on http://{host}:{port}"
            asyncio.run(_serve_until_signals(ready, engines, options.drain_timeout_s))
        finally:
            serve.shutdown()


def _run(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> DeploymentHandle[object]:
    with starting("the replicas"):
        try:
            return serve.run(application(engine_dir, options, replicas), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            status = serve.status().applications.get(APPLICATION)
            messages = [d.message for d in status.deployments.values() if d.message] if status else []
            reason = (messages or [str(error)])[0].strip().splitlines()[-1]
            if own := re.fullmatch(r"ddtree_trt\.errors\.(\w+): (.+)", reason):
                raise getattr(errors, own[1])(own[2]) from error
            raise RuntimeError(reason) from error


async def _serve_until_signals(ready: str, engines: DeploymentHandle[object], drain_timeout_s: float) -> None:
    """Wait for a signal, then until the requests under way have finished; a second signal ends them."""
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    print(ready, flush=True)  # who reads it may send a signal
    await signals.get()
    drained = asyncio.ensure_future(engines.broadcast("drain", drain_timeout_s).results_async())
    while not drained.done():
        another = asyncio.ensure_future(signals.get())
        await asyncio.wait({drained, another}, return_when=asyncio.FIRST_COMPLETED)
        if another.done():
            await engines.broadcast("end_all").results_async()
        another.cancel()
    drained.result()
