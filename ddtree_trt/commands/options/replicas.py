"""Options of the commands that have replicas."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_trt.errors import UsageError
from ddtree_trt.replicas.options import ReplicaOptions

Replicas = Annotated[
    int | None,
    typer.Option(metavar="N", help="Engines, on the machines of a Ray cluster. Without it: one, in this process."),
]
MaxReplicas = Annotated[
    int | None, typer.Option(metavar="N", help="Engines at most: more are started as requests queue.")
]
TargetOngoingRequests = Annotated[
    float | None,
    typer.Option(metavar="X", help="Requests per engine above which more are started. Default: its slots."),
]
CpusPerReplica = Annotated[
    float | None, typer.Option(metavar="X", help="Default: the cluster's CPUs, divided among the replicas.")
]
GpusPerReplica = Annotated[
    float | None, typer.Option(metavar="X", help="Default: what an engine needs: 1, --tensor-parallel-size, or 0.")
]


def replica_options(
    replicas: int | None,
    cpus_per_replica: float | None,
    gpus_per_replica: float | None,
    max_replicas: int | None = None,
    target_ongoing_requests: float | None = None,
) -> ReplicaOptions | None:
    """The options as a record; None for one engine in this process. Raises UsageError."""
    if replicas is not None:
        return ReplicaOptions(replicas, max_replicas, target_ongoing_requests, cpus_per_replica, gpus_per_replica)
    others = {
        "--max-replicas": max_replicas,
        "--target-ongoing-requests": target_ongoing_requests,
        "--cpus-per-replica": cpus_per_replica,
        "--gpus-per-replica": gpus_per_replica,
    }
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"{name} needs --replicas")
    return None
