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
    for part in ("ray.serve", "ray.data"):
        logging.getLogger(part).setLevel(logging.WARNING)
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


def resources_per_replica(backend: str, replicas: ReplicaOptions, ranks: int = 1) -> tuple[float, float]:
    """CPUs and GPUs of each replica, as given, else by what the cluster has now. `ranks`: processes of an engine."""
    total, largest = _resources()
    gpus, place = replicas.gpus_per_replica, BACKENDS[backend].place
    if gpus is None:
        gpus = float(ranks) if place == "GPU" or (place == "device" and total["GPU"]) else 0.0
    cpus = replicas.cpus_per_replica
    if cpus is None:
        cpus = min(total["CPU"] / replicas.most, largest["CPU"])
        cpus = float(int(cpus)) if cpus >= 1 else cpus  # Ray takes fractions below 1 only
    return cpus, gpus


def check_room(backend: str, replicas: ReplicaOptions, ranks: int = 1) -> None:
    """Raises UsageError where a cluster that does not grow has no room for as many replicas as there may be."""
    total, _ = _resources()
    for kind, each in zip(total, resources_per_replica(backend, replicas, ranks), strict=True):
        if each * replicas.most > total[kind]:
            raise UsageError(
                f"{replicas.most} replicas of {each:g} {kind}s need {each * replicas.most:g}, and this machine has "
                f"{total[kind]:g}; have fewer, lower --{kind.lower()}s-per-replica, or join machines to a Ray cluster"
            )


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    """CPUs and GPUs of the whole cluster, and of its largest machine."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds = ("CPU", "GPU")
    return {k: sum(n.get(k, 0.0) for n in nodes) for k in kinds}, {k: max(n.get(k, 0.0) for n in nodes) for k in kinds}
