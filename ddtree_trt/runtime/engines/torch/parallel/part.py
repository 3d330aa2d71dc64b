"""A rank's part of an engine, and whole rows of logits from the parts of all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.engines.base import Verdict
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.shard import Shard
from ddtree_trt.runtime.engines.torch.parallel.split import local_manifest
from ddtree_trt.runtime.engines.torch.weights import check_device, read_weights

ALL_ROWS = -1


def open_part(directory: Path, manifest: Manifest, device: torch.device, shard: Shard) -> TorchEngine:
    """Load this rank's part of an engine: of split weights, it alone is read. Raises ArtifactError as
    `TorchEngine.open` does."""
    check_device(directory, manifest, device)
    weights = read_weights(directory, manifest, device, shard)
    return TorchEngine(local_manifest(manifest, shard), weights, device, shard)


def whole_rows(engine: TorchEngine, verdict: Verdict, row: int) -> NDArray[np.float32]:
    """Row `row` of a verdict's logits over the whole vocabulary, or ALL_ROWS, float32 [1 or R, V]. All ranks call it
    with their parts of the same pass."""
    rows = np.asarray(verdict.logits) if row == ALL_ROWS else verdict.logits[row][None]
    part = torch.from_numpy(rows).to(engine.device)
    whole: NDArray[np.float32] = engine.target.network.vocabulary.join(part).cpu().numpy()
    return whole
