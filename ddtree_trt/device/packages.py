"""Importing the optional packages of NVIDIA, which may be absent or lack their shared libraries."""

from __future__ import annotations

import importlib
from typing import Any

from ddtree_trt.artifact.backends import TENSORRT
from ddtree_trt.errors import MissingDependency, install_with


def import_package(module: str, refusal: str | None = None, extra: str = TENSORRT.extra) -> Any:
    """The imported module, which the extra of a backend's name installs. Raises MissingDependency, whose text begins
    with `refusal`, where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a package whose shared libraries are absent
        reason = str(error).splitlines()[0]
        refusal = refusal or f"the {extra} backend cannot import {module}"
        raise MissingDependency(f"{refusal} ({reason}); {install_with(extra)}") from error
