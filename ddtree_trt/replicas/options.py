"""Options of replicas, with their defaults, ranges and words. Imports little: the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.errors import MAX_COUNT, UsageError
from ddtree_trt.records import check, option


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines there are, and what each gets. Raises UsageError for a value out of range."""

    replicas: int = option(
        1, "Engines, on the machines of a Ray cluster. Without it: one, in this process.", within=(1, MAX_COUNT)
    )
    max_replicas: int | None = option(
        None, "Engines at most: more are started as requests queue.", within=(1, MAX_COUNT)
    )
    target_ongoing_requests: float | None = option(
        None, "Requests per engine above which more are started. Default: its slots.", "X", within=(0.01, MAX_COUNT)
    )
    cpus_per_replica: float | None = option(
        None, "Default: the cluster's CPUs, divided among the replicas.", "X", within=(0, MAX_COUNT)
    )
    gpus_per_replica: float | None = option(
        None, "Default: what an engine needs: 1, --tensor-parallel-size, or 0.", "X", within=(0, MAX_COUNT)
    )

    def __post_init__(self) -> None:
        check(self)
        if self.most < self.replicas:
            raise UsageError(f"max_replicas {self.most} is below replicas {self.replicas}, how many there are at least")

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas
