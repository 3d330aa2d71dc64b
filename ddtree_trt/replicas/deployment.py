"""The application of Ray Serve: engines, and an ingress before them.

`serve run ddtree_trt.replicas.deployment:app engine_dir=/path/to/engine replicas=2` deploys it with Ray's own command.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig
from starlette.types import Message

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import UsageError
from ddtree_trt.replicas.cluster import resources_per_replica
from ddtree_trt.replicas.engine_app import Call, EngineApp
from ddtree_trt.replicas.ingress import Ingress
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.replicas.pages import ACCEPT
from ddtree_trt.serve import request_log
from ddtree_trt.serve.options import ServeOptions

# Requests of one key go to one engine while it has room, then to the next; an engine that comes or goes moves only the
# keys that are its own. Ray's router by prefixes cannot be imported without vLLM or SGLang.
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_ENGINES_PER_INGRESS = 8
_STOP_POLL_S = 0.5  # how often a replica that ends looks whether its requests have finished
_SEND_ERRORS_S = 5.0  # after a drain, for the errors of requests that it ended
_RAYS_OWN = ("host", "port", "stall_timeout_s")  # Ray's proxies have the sockets


class Engine:
    """A Ray Serve deployment: one engine with the server's application."""

    async def __init__(self, engine_dir: Path, options: ServeOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        if options.request_log:
            request_log.show()
        self._app = EngineApp(engine_dir, options)
        await self._app.start()

    async def respond(self, call: Call) -> AsyncIterator[list[Message]]:
        async for messages in self._app.respond(call):
            yield messages

    async def page(self) -> tuple[str, str]:
        """This replica's name and its metrics page."""
        _, page = await self._app.answer(Call("GET", "/metrics", headers=((b"accept", ACCEPT.encode()),)))
        return serve.get_replica_context().replica_id.unique_id, page.decode()

    async def check_health(self) -> None:
        await self._app.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_app"):
            await self._app.stop()


def application(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> Application:
    """The application, to be run on the Ray cluster that this process is connected to.

    Args:
        engine_dir: the engine, at the same path on every machine of the cluster.
        options: those of the server; `host`, `port` and `stall_timeout_s` are Ray's and not read here.

    Raises ArtifactError when there is no engine, UsageError for resources that no machine has.
    """
    engine_dir = engine_dir.resolve()
    manifest = load_manifest(engine_dir)
    slots = manifest.limits.max_batch
    cpus, gpus = resources_per_replica(manifest.backend, replicas, options.tensor_parallel_size)
    engine_options = replace(options, threads=options.threads or max(1, int(cpus) // options.tensor_parallel_size))
    # What engines and ingresses log is for the terminal, which the controller of `serve --replicas` keeps from its own.
    shown = {"env_vars": {"RAY_SERVE_LOG_TO_STDERR": "1"}}
    logging_config = LoggingConfig(log_level="WARNING", enable_access_log=options.access_log)
    engines = serve.deployment(
        name="Engine",
        **_scale(replicas, slots),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus, "runtime_env": shown},
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
        logging_config=logging_config,
    )(Engine)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1 + (replicas.most - 1) // _ENGINES_PER_INGRESS,
        ray_actor_options={"num_cpus": 0, "runtime_env": shown},
        max_ongoing_requests=2 * options.max_requests,  # the gate refuses first
        graceful_shutdown_wait_loop_s=_STOP_POLL_S,
        graceful_shutdown_timeout_s=options.drain_timeout_s + _SEND_ERRORS_S,
        logging_config=logging_config,
    )(serve.ingress()(Ingress))
    return ingress.bind(engines.bind(engine_dir, engine_options), engine_dir, options)


def _scale(replicas: ReplicaOptions, slots: int) -> dict[str, Any]:
    if replicas.most == replicas.replicas:
        return {"num_replicas": replicas.replicas}
    scaling = {
        "min_replicas": replicas.replicas,
        "max_replicas": replicas.most,
        "target_ongoing_requests": replicas.target_ongoing_requests or slots,
    }
    return {"autoscaling_config": scaling}


@dataclass(frozen=True)
class _Arguments:
    __pydantic_config__ = ConfigDict(extra="forbid")
    engine_dir: Path


def app(arguments: dict[str, Any]) -> Application:
    """The application by Ray's own commands and configuration files: `engine_dir`, and any field of ServeOptions and
    ReplicaOptions but those that are Ray's. Raises UsageError."""
    given = dict(arguments)
    made = []
    for kind in (ServeOptions, ReplicaOptions):
        own = {f.name: given.pop(f.name) for f in fields(kind) if f.name in given and f.name not in _RAYS_OWN}
        made.append(_parsed(kind, own))
    place = _parsed(_Arguments, given)
    return application(place.engine_dir, *made)


def _parsed(kind: Any, values: dict[str, Any]) -> Any:
    """The values, which may be texts, as a dataclass."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {first['msg']}") from error
