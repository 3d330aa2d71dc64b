"""What an engine directory holds, gathered for people (`ddtree-trt inspect`) and for programs (`--json`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt import artifact
from ddtree_trt.artifact import Manifest, Progress, load_manifest, no_progress, verify_files


@dataclass(frozen=True)
class Memory:
    """Host memory an engine takes, in bytes."""

    weights_bytes: int
    kv_bytes_per_slot: int  # both networks, at full length
    kv_bytes_all_slots: int


@dataclass(frozen=True)
class EngineReport:
    directory: str
    manifest: Manifest
    memory: Memory
    total_bytes: int  # on disk
    has_profile: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect_engine(directory: Path, progress: Progress = no_progress) -> EngineReport:
    """Read an engine's manifest and verify every file of it. Raises ArtifactError."""
    manifest = load_manifest(directory)
    verify_files(directory, manifest, progress)
    per_token = manifest.target_dims.kv_bytes_per_token + manifest.drafter_dims.kv_bytes_per_token
    per_slot = per_token * manifest.limits.cache_rows
    weights = manifest.files.get(artifact.WEIGHTS)
    return EngineReport(
        directory=str(directory),
        manifest=manifest,
        memory=Memory(
            weights_bytes=weights.size if weights else 0,
            kv_bytes_per_slot=per_slot,
            kv_bytes_all_slots=per_slot * manifest.limits.max_batch,
        ),
        total_bytes=sum(entry.size for entry in manifest.files.values()),
        has_profile=(directory / artifact.PROFILE).is_file(),
    )
