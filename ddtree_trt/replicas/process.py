"""`ddtree-trt serve --replicas`: deploys the application on a Ray cluster, and removes it when a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from queue import SimpleQueue

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.replicas.cluster import check_room, connected, resources_per_replica
from ddtree_trt.replicas.deployment import application
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.server import listen

APPLICATION = "ddtree-trt"
_POLL_S = 0.2  # how often a second signal is looked for while the first one's drain goes on


def serve_replicas(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> None:
    """Serve an engine by replicas until SIGTERM or SIGINT ends it. Prints one line when it is ready.

    Raises ArtifactError when there is no engine, EngineError when the replicas do not start, UsageError when the
    address cannot be used, the machine has no room, or Ray Serve runs on the cluster already.
    """
    manifest = load_manifest(engine_dir)
    if options.stall_timeout_s != ServeOptions.stall_timeout_s:
        raise UsageError("--stall-timeout cannot be had with --replicas: Ray's proxy has the connections; leave it out")
    with listen(options) as listener:  # that the address can be used, and which port 0 stands for
        port = listener.getsockname()[1]
    with connected() as started:
        if started:
            check_room(manifest.backend, replicas, options.tensor_parallel_size)
        elif serve.status().applications:
            raise UsageError(
                "Ray Serve runs applications on this cluster already; deploy beside them with: "
                f"serve run ddtree_trt.replicas.deployment:app engine_dir={engine_dir.resolve()}"
            )
        cpus, gpus = resources_per_replica(manifest.backend, replicas, options.tensor_parallel_size)
        serve.start(
            http_options={"host": options.host, "port": port}, logging_config=LoggingConfig(log_level="WARNING")
        )
        try:
            ingress = _run(engine_dir, options, replicas)
            count = f"{replicas.replicas}" + f" to {replicas.most}" * (replicas.most > replicas.replicas)
            each = f"{manifest.limits.max_batch} slots, {_count(cpus, 'CPU')}" + f", {_count(gpus, 'GPU')}" * bool(gpus)
            host = f"[{options.host}]" if ":" in options.host else options.host
            name = options.model_name or manifest.name
            print(f"serving {name} ({count} replicas of {each}, by Ray) on http://{host}:{port}", flush=True)
            _serve_until_signals(ingress, options.drain_timeout_s)
        finally:
            serve.delete(APPLICATION)
            if not started:
                serve.shutdown()


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' * (number != 1)}"


def _run(engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions) -> DeploymentHandle[object]:
    try:
        return serve.run(application(engine_dir, options, replicas), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        status = serve.status().applications.get(APPLICATION)
        messages = [d.message for d in status.deployments.values() if d.message] if status else []
        reason = (messages or [str(error)])[0].strip().splitlines()[-1]
        raise EngineError(f"the replicas did not start: {reason}") from error


def _serve_until_signals(ingress: DeploymentHandle[object], drain_timeout_s: float) -> None:
    """Wait for SIGTERM or SIGINT, then until the requests under way have finished; a second signal ends them."""
    signals: SimpleQueue[int] = SimpleQueue()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, frame: signals.put(number))
    try:
        signals.get()
        asyncio.run(_drain(ingress, drain_timeout_s, signals))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _drain(ingress: DeploymentHandle[object], timeout_s: float, signals: SimpleQueue[int]) -> None:
    drained = asyncio.ensure_future(ingress.broadcast("drain", timeout_s).results_async())
    while not drained.done():
        await asyncio.wait({drained}, timeout=_POLL_S)
        if not signals.empty():
            signals.get()
            await ingress.broadcast("end_all").results_async()
    drained.result()
