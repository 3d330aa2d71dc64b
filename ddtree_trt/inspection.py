"""The report on an engine directory that `ddtree-trt inspect` prints, as text or with `--json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.device.memory import MemoryPlan, plan_manifest
from ddtree_trt.errors import DDTreeError
from ddtree_trt.runtime.decoding.routing import engine_host_reason


@dataclass(frozen=True)
class EngineReport:
    directory: str
    manifest: Manifest
    memory: MemoryPlan
    problem: str | None  # why it cannot run on this machine, as far as that is known without loading it
    total_bytes: int  # on disk
    has_profile: bool
    no_device_rounds: str | None  # why no request's rounds can stay on the device; None: those of fixed budgets can

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "memory": self.memory.to_dict()}


def inspect_engine(directory: Path, progress: Progress = no_progress) -> EngineReport:
    """Read an engine's manifest and verify every file of it. Raises ArtifactError."""
    manifest = load_manifest(directory)
    verify_files(directory, manifest, progress)
    problem = None
    if BACKENDS[manifest.backend].plans:
        from ddtree_trt.runtime.engines.tensorrt.opening import check_machine

        try:
            check_machine(directory, manifest)
        except DDTreeError as error:
            problem = str(error)
    return EngineReport(
        directory=str(directory),
        manifest=manifest,
        memory=plan_manifest(manifest),
        problem=problem,
        total_bytes=sum(entry.size for entry in manifest.files.values()),
        has_profile=(directory / artifact.PROFILE).is_file(),
        no_device_rounds=engine_host_reason(manifest),
    )
