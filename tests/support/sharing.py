"""What the processes of one test run share: how many they are, and engines that only the first of them builds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

WORKER_BYTES = 3 << 30  # what one process of the suite holds at its largest, with the programs it starts


def worker_count(cores: int, free_bytes: int) -> int:
    """As many processes as there are cores, and no more than fit into free memory."""
    return max(1, min(cores, free_bytes // WORKER_BYTES))


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all processes of this run see."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """A copy, for this process alone, of the directory that `build` makes in the first process that asks for it."""
    built = run_folder(factory) / "built" / name
    built.parent.mkdir(exist_ok=True)
    with FileLock(f"{built}.lock"):
        if not built.exists():
            partial = built.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial / "engine")
            partial.rename(built)
    return shutil.copytree(built / "engine", factory.mktemp(name) / "tiny")
