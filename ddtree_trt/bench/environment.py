"""The machine, the software and the engine of a run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.device.cpu import busy_warning
from ddtree_trt.doctor import diagnose
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.profile import fingerprint

_PEER_PACKAGES = ("torch", "transformers", "tensorrt", "tensorrt_llm", "openai", "datasets")


@dataclass(frozen=True)
class Environment:
    """The machine and the software."""

    machine: str
    cores: int  # usable by this process
    cpu_features: tuple[str, ...]
    gpus: tuple[str, ...]
    platform: str
    python: str
    product_version: str
    packages: dict[str, str]
    load_1min: float  # runnable processes at the start
    started: str  # UTC, ISO 8601

    @property
    def warning(self) -> str | None:
        """Where other processes were using the machine, so that times mean little."""
        return busy_warning(self.load_1min, self.cores)


@dataclass(frozen=True)
class EngineInfo:
    """The engine: its networks, its limits, and the machine its profile was measured on."""

    name: str
    backend: str
    precision: str
    target: str
    target_sha256: str
    drafter: str
    drafter_sha256: str
    block_size: int | None  # None for a drafter without blocks
    max_seq_len: int
    max_tree_budget: int
    digest: str  # of the manifest, hence of every file of the engine
    fingerprint: str  # engine, machine, runtime and threads together
    threads: int

    @property
    def networks(self) -> tuple[str, ...]:
        """The fields that are equal in two builds of the same pair."""
        return self.backend, self.precision, self.target_sha256, self.drafter_sha256


def read_environment() -> Environment:
    """The current state of this machine."""
    diagnosis = diagnose()
    gpus = tuple(f"{g.name}, {g.memory}, driver {g.driver}" for g in diagnosis.gpus)
    return Environment(
        machine=str(diagnosis.cpu),
        cores=diagnosis.cpu.cores,
        cpu_features=diagnosis.cpu.features,
        gpus=gpus,
        platform=diagnosis.platform,
        python=diagnosis.python,
        product_version=__version__,
        packages={**diagnosis.packages, **installed_versions(*_PEER_PACKAGES)},
        load_1min=round(os.getloadavg()[0], 2),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def describe_engine(manifest: Manifest, engine: Engine) -> EngineInfo:
    """The engine's entry in a result."""
    return EngineInfo(
        name=manifest.name,
        backend=manifest.backend,
        precision=manifest.precision,
        target=manifest.target.name,
        target_sha256=manifest.target.sha256,
        drafter=manifest.drafter.name,
        drafter_sha256=manifest.drafter.sha256,
        block_size=manifest.drafting.block_size,
        max_seq_len=manifest.limits.max_seq_len,
        max_tree_budget=manifest.limits.max_tree_budget,
        digest=json.loads(manifest.to_json())["digest"],
        fingerprint=fingerprint(manifest, engine.threads),
        threads=engine.threads,
    )
