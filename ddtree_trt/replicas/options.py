"""Options of replicas, with their defaults and ranges. Imports little: the command line reads the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.errors import MAX_COUNT, UsageError, check_range


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines there are, and what each gets. Raises UsageError for a value out of range."""

    replicas: int = 1  # engines at the start, and at least
    max_replicas: int | None = None  # engines at most, started as requests queue; None: always `replicas`
    target_ongoing_requests: float | None = None  # per engine; above it more are started. None: the engine's slots
    cpus_per_replica: float | None = None  # None: the cluster's, divided among the replicas
    gpus_per_replica: float | None = None  # None: one for each process of an engine that needs it, else 0

    def __post_init__(self) -> None:
        check_range("replicas", self.replicas, 1, MAX_COUNT)
        for name, low, high in (
            ("max_replicas", 1, MAX_COUNT),
            ("target_ongoing_requests", 0.01, MAX_COUNT),
            ("cpus_per_replica", 0, MAX_COUNT),
            ("gpus_per_replica", 0, MAX_COUNT),
        ):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, low, high)
        if self.most < self.replicas:
            raise UsageError(f"max_replicas {self.most} is below replicas {self.replicas}, how many there are at least")

    @property
    def most(self) -> int:
        """Engines at most."""
        return self.replicas if self.max_replicas is None else self.max_replicas
