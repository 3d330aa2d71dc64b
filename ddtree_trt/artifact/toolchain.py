"""Versions of the packages that compile engines, and the form of the drafter's graph that they require."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata

_CAUSAL_OPTION = (1, 30)  # the first ONNX Runtime whose attention kernel takes `causal=0`; Python 3.10 has none of them
RANKS = "tensor_parallel_size"  # key of a running engine's toolchain: processes over which its target is split


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed, without importing any."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def always_causal(toolchain: Mapping[str, str]) -> bool:
    """Whether this toolchain's ONNX Runtime may be one whose attention kernel is always causal.

    A DFlash drafter compiled for such a kernel writes its block twice and runs everywhere. Compiled for the others it
    runs on those only.
    """
    found = re.match(r"(\d{1,9})\.(\d{1,9})", toolchain.get("onnxruntime", ""))
    # Unknown where it was packaged under another name.
    return found is None or (int(found[1]), int(found[2])) < _CAUSAL_OPTION
