"""A rank's part of an engine, and whole rows of logits from the parts of all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.shard import Shard
from ddtree_trt.runtime.engines.torch.parallel.split import local_manifest
from ddtree_trt.runtime.engines.torch.weights import check_device, read_weights


def open_part(directory: Path, manifest: Manifest, device: torch.device, shard: Shard) -> TorchEngine:
    """Load this rank's part of an engine: of split weights, it alone is read. Raises ArtifactError as
    `TorchEngine.open` does."""
    check_device(directory, manifest, device)
    weights = read_weights(directory, manifest, device, shard)
    return TorchEngine(local_manifest(manifest, shard), weights, device, shard)


def whole_rows(engine: TorchEngine, number: int) -> Tensor:
    """The logits of verdict `number` of the last pass over the whole vocabulary, float32 [R, V] on the device. All
    ranks call it."""
    return engine.target.network.vocabulary.join(engine.target.last_logits[number])
