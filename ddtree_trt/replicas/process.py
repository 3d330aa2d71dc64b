"""`ddtree-trt serve --replicas`: deploys the application on a Ray cluster, and removes it when a signal ends it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from queue import SimpleQueue

from ray import serve
from ray.serve.handle import DeploymentHandle

from ddtree_trt import errors
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import UsageError
from ddtree_trt.replicas.deployment import application, connected, log_settings, resources_per_replica, starting
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.server import listen

APPLICATION = "ddtree-trt"
_POLL_S = 0.2  # how often a second signal is looked for while the first one's drain goes on
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
            each = f"{manifest.limits.max_batch} slots, {_count(cpus, 'CPU')}" + f", {_count(gpus, 'GPU')}" * bool(gpus)
            host = f"[{options.host}]" if ":" in options.host else options.host
            name = options.model_name or manifest.name
            ready = f"serving {name} ({count} replicas of {each}, by Ray) on http://{host}:{port}"
            _serve_until_signals(ready, engines, options.drain_timeout_s)
        finally:
            serve.shutdown()


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' * (number != 1)}"


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


def _serve_until_signals(ready: str, engines: DeploymentHandle[object], drain_timeout_s: float) -> None:
    """Print `ready` and wait for SIGTERM or SIGINT, then until the requests under way have finished; a second signal
    ends them."""
    signals: SimpleQueue[int] = SimpleQueue()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, frame: signals.put(number))
    try:
        print(ready, flush=True)  # who reads it may send a signal
        signals.get()
        asyncio.run(_drain(engines, drain_timeout_s, signals))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _drain(engines: DeploymentHandle[object], timeout_s: float, signals: SimpleQueue[int]) -> None:
    drained = asyncio.ensure_future(engines.broadcast("drain", timeout_s).results_async())
    while not drained.done():
        await asyncio.wait({drained}, timeout=_POLL_S)
        if not signals.empty():
            signals.get()
            await engines.broadcast("end_all").results_async()
    drained.result()
