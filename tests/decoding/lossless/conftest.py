"""Pairs of every kind of drafter as engines, for real rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_builds import PACKAGED
from sharing import build_once

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.commands.build import measure

LIMITS: dict[str, Any] = {"max_seq_len": 512, "max_batch": 4, "max_tree_budget": 256}
REQUESTS: dict[str, dict[str, Any]] = {
    "dflash": {"target": "tiny"},
    "hybrid": {"target": "tiny-hybrid"},
    "dspark": {"target": "tiny-dspark"},
    "eagle3": {"target": "tiny-eagle3"},
    # The target drafts for itself: all is accepted but for the lies that a test puts in.
    "autoregressive": {"target": "own", "checkpoint": PACKAGED / "target", "drafter": PACKAGED / "target"},
}


@pytest.fixture(scope="session")
def built(no_measuring: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """The engine of a drafter's kind, a backend and a precision, built when first asked for."""

    def engine(kind: str, backend: str, precision: str) -> Path:
        def build(directory: Path) -> None:
            options: Any = {**REQUESTS[kind], **LIMITS, "backend": backend, "precision": precision}
            compile_engine(BuildRequest(output=directory, **options))
            measure(directory, lambda stage, done, total: None)

        return build_once(tmp_path_factory, f"{kind}-{backend}-{precision}", build)

    return engine
