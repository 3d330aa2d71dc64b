"""The Ray cluster: connecting to it or starting one on this machine, and what each replica gets of it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.errors import DDTreeError, EngineError, UsageError
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.serve.options import ServeOptions

_CONNECT_S = 20.0  # timeout for a cluster's address: Ray itself tries for minutes


@contextmanager
def starting(what: str) -> Iterator[None]:
    """The block starts `what`. Raises EngineError where Ray fails in it, of which Ray's errors have no common class."""
    try:
        yield
    except DDTreeError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise EngineError(
            f"{what} did not start ({type(error).__name__}: {lines[0]}); end what else keeps this machine busy and try "
            f"again, else see {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
        ) from error


@contextmanager
def connected() -> Iterator[bool]:
    """Connect to the cluster of RAY_ADDRESS, or to one that runs on this machine, else start one here that ends with
    the block. Yields whether it was started here. RAY_ADDRESS=local starts one in any case. Raises UsageError when
    nothing answers at RAY_ADDRESS, EngineError when Ray does not start."""
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
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield started
    finally:
        ray.shutdown()


def resources_per_replica(
    backend: str, replicas: ReplicaOptions, ranks: int = 1, *, check: bool = False
) -> tuple[float, float]:
    """CPUs and GPUs of each replica, as given, else by what the cluster has now. `ranks`: processes of an engine.

    With `check`, for a cluster that does not grow, raises UsageError where it has no room for as many replicas as there
    may be.
    """
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
    """Threads of an engine that has so many processors."""
    return options.threads or max(1, int(cpus) // options.tensor_parallel_size)
