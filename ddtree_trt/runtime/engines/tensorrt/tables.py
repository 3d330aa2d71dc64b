"""The embeddings and heads of an engine directory, which both plans read from one copy on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.tensor_files import read_tensors
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.drafters.kind import EMBEDDING, HEAD
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Source

_PIECE_BYTES = 16 << 20  # of a table that is converted during its upload


class Tables:
    """The tables of shared.safetensors: [V, H] in the engine's precision, a drafter's own under its prefix."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        path = directory / artifact.SHARED_WEIGHTS
        rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
        self._tensors = read_tensors(path, Source(f"{path} cannot be read", ArtifactError, rebuild))
        dtype = PRECISIONS[manifest.precision].safetensors
        shapes = _shapes(manifest)
        # Name of a table that passes read → the tensor of the file that it is: a head that is absent is tied.
        self.sources: dict[str, str] = {}
        for name in shapes:
            tied = name.removesuffix(names.HEAD) + names.EMBEDDING
            self.sources[name] = source = name if name in self._tensors or tied not in shapes else tied
            if source not in self._tensors:
                raise ArtifactError(f"{path} has no tensor {source!r}; {rebuild}")
        for name, tensor in self._tensors.items():
            expected, found = (dtype, shapes.get(name)), (tensor.dtype, tensor.shape)
            if name not in shapes:
                raise ArtifactError(f"{path} has a tensor {name!r} that the engine has no place for; {rebuild}")
            if found != expected:
                raise ArtifactError(f"{path}: {name} should be {expected}, found {found}; {rebuild}")

    def upload(self, tensor: str, device: Device, address: int) -> None:
        """Upload a table and wait for the copy."""
        device.upload(address, self._tensors[tensor].mapped())
        device.synchronize()

    def upload_single(self, tensor: str, device: Device, address: int) -> None:
        """Upload a table as float32, which represents its values exactly, and wait for the copy."""
        table = self._tensors[tensor].mapped()
        step = _PIECE_BYTES // table.itemsize
        for start in range(0, len(table), step):
            piece = table[start : start + step].astype(np.float32)
            device.upload(address, piece)
            device.synchronize()
            address += piece.nbytes


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Shapes of the tables that passes read, by their names."""
    parts = {EMBEDDING: names.EMBEDDING, HEAD: names.HEAD}
    networks = {"": manifest.target_dims, names.DRAFTER: manifest.drafter_dims}
    return {
        prefix + parts[table.name]: table.shape
        for prefix, dims in networks.items()
        for table in kind_of(dims).own_tables
    }
