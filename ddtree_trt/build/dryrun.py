"""A build's result and memory, computed from both networks' configuration alone: nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.build.compile import BuildRequest, resolve
from ddtree_trt.device.gpus import available_bytes, find_gpus
from ddtree_trt.device.memory import MemoryPlan, plan_engine
from ddtree_trt.errors import BuildError


@dataclass(frozen=True)
class DryRun:
    name: str
    backend: BackendName
    precision: PrecisionName
    limits: Limits
    memory: MemoryPlan
    available_bytes: int | None  # of the memory it would run in; None where this machine has no such
    reason: str | None = None  # why backend `auto` chose this one; None where it was named

    def check(self) -> None:
        """Raises BuildError when the engine cannot fit, with the batch that does."""
        memory, available = self.memory, self.available_bytes
        if available is None or memory.total_bytes <= available:
            return
        # Buffers and workspace grow with the slots as the cache does.
        each = (memory.total_bytes - memory.weights_bytes) / memory.slots
        slots = int((available - memory.weights_bytes) // each)
        advice = f"give --max-batch {slots}" if slots > 0 else "give a smaller --max-seq-len, or a smaller pair"
        raise BuildError(
            f"{self.name} needs about {memory.total_bytes / 1e9:.1f} GB of the {memory.place}'s memory, which has "
            f"{available / 1e9:.1f} GB; {advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "limits": vars(self.limits), "memory": self.memory.to_dict()}


def dry_run(request: BuildRequest) -> DryRun:
    """Resolve a request as `compile_engine` would. A hub checkpoint's config.json is fetched, its weights are not.

    Raises UsageError for a wrong request and CheckpointError for a configuration that cannot be used.
    """
    reasons: list[str] = []
    found = resolve(request, reasons.append, dry_run=True)
    name, networks = found.backend.backend.name, (found.pair.target.dims, found.pair.drafter.dims)
    memory = plan_engine(
        name,
        found.precision,
        *networks,
        found.limits,
        found.pair.weights_bytes(name, found.precision),
        native=found.backend.attention(networks) == "native",
    )
    return DryRun(
        name=request.name,
        backend=name,
        precision=found.precision,
        limits=found.limits,
        memory=memory,
        available_bytes=available_bytes(memory.place, find_gpus()),
        reason=next(iter(reasons), None),
    )
