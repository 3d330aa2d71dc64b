"""Opening a TensorRT engine directory: checks, memory, then the plans."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.number_bytes import decode
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.safetensor_header import StoredTensor, read_header
from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import Layout, tensorrt_buffers
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.device.tensorrt_library import io_tensors, load_plugins, make_log
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.plugins import library
from ddtree_trt.plugins.library import KernelLibrary
from ddtree_trt.reading import Source
from ddtree_trt.runtime.engines.tensorrt.checks import check_machine
from ddtree_trt.runtime.engines.tensorrt.network import Shared

_logger = logging.getLogger("ddtree_trt.tensorrt")
_BUFFERS = {
    names.EMBEDDING: buffers.EMBEDDING,
    names.HEAD: buffers.HEAD,
    names.DRAFTER + names.EMBEDDING: buffers.DRAFTER_EMBEDDING,
    names.DRAFTER + names.HEAD: buffers.DRAFTER_HEAD,
}
_PIECE_BYTES = 16 << 20  # of a table that is converted during its upload


@dataclass
class Loaded:
    """The deserialised engines, and one block of device memory for all other data."""

    device: Device
    target: Any  # ICudaEngine
    drafter: Any
    runtime: Any  # must outlive both
    layout: Layout
    addresses: Mapping[str, int]  # buffer → address
    candidates: int  # K of a block drafter; 0 of any other
    target_tables: Mapping[str, int]  # input → address
    drafter_tables: Mapping[str, int]
    shared: Shared

    def close(self) -> None:
        """Release everything, graphs included. Contexts must have been released before."""
        self.target = None
        self.drafter = None
        self.runtime = None
        self.device.close()


def load_plans(directory: Path, manifest: Manifest) -> tuple[Loaded, KernelLibrary]:
    """Check the machine, allocate memory and deserialise the plans. Raises the errors of `TrtEngine.open`."""
    trt, cuda, plugin_library = check_machine(directory, manifest)
    kernels = library.kernels()
    device = Device(cuda)
    try:
        return _load(directory, manifest, trt, device, plugin_library), kernels
    except BaseException:
        device.close()
        raise


def _load(directory: Path, manifest: Manifest, trt: Any, device: Device, plugin_library: Path) -> Loaded:
    stored = _Tables(directory, manifest)
    plans = sum(manifest.files[name].size for name in (artifact.TARGET_PLAN, artifact.DRAFTER_PLAN))
    _check_memory(directory, manifest, device, plans, _layout(manifest, stored, None, 0).total_bytes)
    log = make_log(trt, _logger)
    load_plugins(trt, log, plugin_library, EngineError)
    runtime = trt.Runtime(log)
    target = _deserialise(runtime, log, directory / artifact.TARGET_PLAN, manifest)
    drafter = _deserialise(runtime, log, directory / artifact.DRAFTER_PLAN, manifest)
    _check_engine(directory, manifest, "target", target)
    _check_engine(directory, manifest, "drafter", drafter)
    candidates = int(tuple(drafter.get_tensor_shape(names.LOG_PROBS))[-1]) if manifest.drafting.at_once else 0
    workspace = max(int(target.device_memory_size_v2), int(drafter.device_memory_size_v2))
    layout = _layout(manifest, stored, candidates, workspace)
    _check_memory(directory, manifest, device, 0, layout.total_bytes)  # with the workspace that TensorRT needs
    base = device.allocate(layout.total_bytes)
    addresses = {name: base + offset for name, offset in layout.offsets.items()}
    tables: dict[str, int] = {}
    for prefix in stored.networks:
        embedding, head = prefix + names.EMBEDDING, prefix + names.HEAD
        tables |= {tensor: addresses[_BUFFERS[tensor]] for tensor in (embedding, head)}
        stored.upload(embedding, device, tables[embedding])
        stored.upload_single(head if stored.has(head) else embedding, device, tables[head])
    for cache in (buffers.TARGET_KV, buffers.DRAFTER_KV):
        # Zeros: rows that were never written are multiplied by weights of zero, and a NaN in them would remain NaN.
        device.clear(addresses[cache], layout.sizes[cache])
    device.synchronize()
    shared = Shared(
        trt=trt,
        log=log,
        device=device,
        workspace=(addresses[buffers.WORKSPACE], workspace),
    )
    own = {t.removeprefix(names.DRAFTER): a for t, a in tables.items() if t.startswith(names.DRAFTER)}
    drafter_tables = own or tables
    return Loaded(device, target, drafter, runtime, layout, addresses, candidates, tables, drafter_tables, shared)


def _layout(manifest: Manifest, stored: _Tables, candidates: int | None, workspace: int) -> Layout:
    return Layout.of(
        tensorrt_buffers(
            manifest.target_dims,
            manifest.drafter_dims,
            manifest.limits,
            PRECISIONS[manifest.precision].value_bytes,
            candidates=candidates,
            workspace_bytes=workspace,
        )
    )


def _check_memory(directory: Path, manifest: Manifest, device: Device, weights: int, buffers: int) -> None:
    """Raises EngineError when weights that are not loaded yet and buffers do not fit into the GPU's free memory."""
    free, total = device.free_bytes()
    if weights + buffers > free:
        raise EngineError(
            f"{directory} needs {_gb(weights + buffers)} of GPU memory ({_gb(weights)} of weights, {_gb(buffers)} of "
            f"cache and buffers), {_gb(free)} of {_gb(total)} are free; end what else uses the GPU, or rebuild with a "
            f"smaller --max-batch or --max-seq-len: {rebuild_command(directory, manifest)}"
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _deserialise(runtime: Any, log: Any, path: Path, manifest: Manifest) -> Any:
    log.clear()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ArtifactError(
            f"TensorRT cannot load {path}: {log.words()}; rebuild with: {rebuild_command(path.parent, manifest)}"
        )
    return engine


def _check_engine(directory: Path, manifest: Manifest, name: str, engine: Any) -> None:
    """Raises ArtifactError for a plan that does not match the manifest, which digests do not detect."""
    found = io_tensors(engine)
    listed = manifest.tensors.get(name, {})
    expected = {*listed.get("inputs", ()), *listed.get("outputs", ())}
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    if found != expected:
        different = sorted(found ^ expected)
        raise ArtifactError(
            f"{directory}: the manifest and the {name}'s plan differ in tensor {different[0]}; {rebuild}"
        )
    if engine.num_optimization_profiles not in (1, 2):
        raise ArtifactError(
            f"{directory}: the {name} has {engine.num_optimization_profiles} optimisation profiles, expected 1 or 2; "
            f"{rebuild}"
        )
    dims, limits = manifest.target_dims if name == "target" else manifest.drafter_dims, manifest.limits
    cache = (limits.max_batch, dims.num_kv_heads, limits.cache_rows, dims.head_dim)
    for tensor in names.past_names(dims.num_layers):
        shape = tuple(engine.get_tensor_shape(tensor)) if tensor in found else None
        if shape != cache:
            raise ArtifactError(f"{directory}: {tensor} of the {name} should be {cache}, found {shape}; {rebuild}")


class _Tables:
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
