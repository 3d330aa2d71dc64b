"""The embeddings and heads of an engine directory, which both plans read from one copy on the device."""

from __future__ import annotations

from pathlib import Path

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.number_bytes import decode
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.safetensor_header import StoredTensor, read_header
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Source

_PIECE_BYTES = 16 << 20  # of a table that is converted during its upload


class Tables:
    """The tables of shared.safetensors: [V, H] in the engine's precision."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        path = directory / artifact.SHARED_WEIGHTS
        rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
        try:
            header = read_header(path, Source(f"{path} cannot be read", ArtifactError, rebuild))
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read ({error}); {rebuild}") from error
        dtype = PRECISIONS[manifest.precision].safetensors
        for name, entry in header.entries.items():
            dims = manifest.drafter_dims if name.startswith(names.DRAFTER) else manifest.target_dims
            expected, found = (dtype, (dims.vocab_size, dims.hidden_size)), (entry.dtype, entry.shape)
            if found != expected:
                raise ArtifactError(f"{path}: {name} should be {expected}, found {found}; {rebuild}")
        self._tensors: dict[str, StoredTensor] = header.locate()
        self.networks = ("", names.DRAFTER) if manifest.drafting.own_tables else ("",)  # with separate tables
        for prefix in self.networks:
            if not self.has(prefix + names.EMBEDDING):
                raise ArtifactError(f"{path} has no tensor {prefix + names.EMBEDDING!r}; {rebuild}")

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def upload(self, tensor: str, device: Device, address: int) -> None:
        """Upload a table and wait for the copy."""
        device.upload(address, self._tensors[tensor].mapped())
        device.synchronize()

    def upload_single(self, tensor: str, device: Device, address: int) -> None:
        """Upload a table as float32, which represents its values exactly, and wait for the copy."""
        table = self._tensors[tensor].mapped()
        step = _PIECE_BYTES // table.itemsize
        for start in range(0, len(table), step):
            piece = decode(table[start : start + step])
            device.upload(address, piece)
            device.synchronize()
            address += piece.nbytes
