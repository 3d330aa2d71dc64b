"""The context that every peer is made with."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.bench.pairs.checkpoints import Checkpoints, find_checkpoints
from ddtree_trt.bench.settings import BenchSettings


@dataclass(frozen=True)
class PeerContext:
    """The engine a peer is compared with, and its checkpoints."""

    settings: BenchSettings
    manifest: Manifest
    threads: int  # the engine's; a peer on the CPU uses as many
    unusable_tokens: frozenset[int]  # no forced choice may be one of them

    @property
    def dtype(self) -> str:
        """The PyTorch type of the engine's precision. No peer runs in 8 bits: beside an int8 engine they compute in the
        type that checkpoints are published in."""
        precision = PRECISIONS[self.manifest.precision]
        return "bfloat16" if precision.quantized else precision.dtype

    def checkpoints(self) -> Checkpoints:
        return find_checkpoints(self.manifest, self.settings)
