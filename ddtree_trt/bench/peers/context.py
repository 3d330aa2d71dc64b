"""What a peer is given: the engine it is compared with, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.pairs.checkpoints import Checkpoints, find_checkpoints
from ddtree_trt.bench.settings import BenchSettings


@dataclass(frozen=True)
class PeerContext:
    """The engine's side of a comparison."""

    settings: BenchSettings
    manifest: Manifest
    threads: int  # the engine's; a peer on the CPU uses as many
    unusable_tokens: frozenset[int]  # no forced choice may be one of them

    @property
    def dtype(self) -> str:
        """The PyTorch type of the engine's precision. None is run in 8 bits: beside an int8 engine peers compute in the
        type that checkpoints are published in."""
        names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "bfloat16"}
        return names[self.manifest.precision]

    def checkpoints(self) -> Checkpoints:
        return find_checkpoints(self.manifest, self.settings)
