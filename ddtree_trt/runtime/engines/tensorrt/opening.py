"""Opening a TensorRT engine directory: checks, memory, then the plans."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import CacheShape, Layout, tensorrt_buffers
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.device.tensorrt_library import io_tensors, load_plugins, make_log
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.runtime.engines.tensorrt.checks import Installed, check_machine
from ddtree_trt.runtime.engines.tensorrt.kernel_cache import KernelCache
from ddtree_trt.runtime.engines.tensorrt.network import Shared
from ddtree_trt.runtime.engines.tensorrt.tables import Tables

_logger = logging.getLogger("ddtree_trt.tensorrt")
_BUFFERS = {
    names.EMBEDDING: buffers.EMBEDDING,
    names.HEAD: buffers.HEAD,
    names.DRAFTER + names.EMBEDDING: buffers.DRAFTER_EMBEDDING,
    names.DRAFTER + names.HEAD: buffers.DRAFTER_HEAD,
}


@dataclass
class Loaded:
    """The deserialised engines, and one block of device memory for all other data."""

    device: Device
    target: Any  # ICudaEngine
    drafter: Any
    compaction: Any
    runtime: Any  # must outlive all of them
    kernel_cache: KernelCache | None  # of TensorRT for RTX
    layout: Layout
    addresses: Mapping[str, int]  # buffer → address
    candidates: int  # K of a block drafter; 0 of any other
    target_tables: Mapping[str, int]  # input → address
    drafter_tables: Mapping[str, int]
    shared: Shared

    def close(self) -> None:
        """Release everything, graphs included. Contexts must have been released before."""
        try:
            if self.kernel_cache is not None:
                self.kernel_cache.close()
        finally:
            self.target = None
            self.drafter = None
            self.compaction = None
            self.runtime = None
            self.device.close()


def load_plans(directory: Path, manifest: Manifest) -> Loaded:
    """Check the machine, allocate memory and deserialise the plans. Raises the errors of `TrtEngine.open`."""
    installed = check_machine(directory, manifest)
    device = Device(installed.cuda)
    try:
        return _load(directory, manifest, installed, device)
    except BaseException:
        device.close()
        raise


def _load(directory: Path, manifest: Manifest, installed: Installed, device: Device) -> Loaded:
    trt, stored = installed.trt, Tables(directory, manifest)
    _check_slots(directory, manifest)
    plans = {
        "target": artifact.TARGET_PLAN,
        "drafter": artifact.DRAFTER_PLAN,
        "compaction": artifact.COMPACTION_PLAN,
    }
    sizes = sum(manifest.files[name].size for name in plans.values())
    _check_memory(directory, manifest, device, sizes, _layout(manifest, stored, None, 0).total_bytes)
    log = make_log(trt, _logger)
    if installed.plugins is not None:
        load_plugins(trt, log, installed.plugins, EngineError)
    runtime = trt.Runtime(log)
    engines = {name: _deserialise(runtime, log, directory / file, manifest) for name, file in plans.items()}
    for name, engine in engines.items():
        _check_engine(directory, manifest, name, engine)
    target, drafter = engines["target"], engines["drafter"]
    candidates = int(tuple(drafter.get_tensor_shape(names.CANDIDATES))[-1]) if manifest.drafting.block_size else 0
    workspace = max(int(engine.device_memory_size_v2) for engine in engines.values())
    layout = _layout(manifest, stored, candidates, workspace)
    _check_memory(directory, manifest, device, 0, layout.total_bytes)  # with the workspace that TensorRT needs
    base = device.allocate(layout.total_bytes)
    addresses = {name: base + offset for name, offset in layout.offsets.items()}
    tables = _fill(device, stored, layout, addresses)
    portable = BACKENDS[manifest.backend].portable
    kernel_cache = KernelCache(trt, directory / artifact.KERNEL_CACHE) if portable else None
    shared = Shared(
        trt=trt,
        log=log,
        device=device,
        workspace=(addresses[buffers.WORKSPACE], workspace),
        make_context=partial(_plain_context, trt) if kernel_cache is None else kernel_cache.make_context,
    )
    own = {t.removeprefix(names.DRAFTER): a for t, a in tables.items() if t.startswith(names.DRAFTER)}
    drafter_tables = {**tables, **own}
    return Loaded(
        device=device,
        target=target,
        drafter=drafter,
        compaction=engines["compaction"],
        runtime=runtime,
        kernel_cache=kernel_cache,
        layout=layout,
        addresses=addresses,
        candidates=candidates,
        target_tables=tables,
        drafter_tables=drafter_tables,
        shared=shared,
    )


def _check_slots(directory: Path, manifest: Manifest) -> None:
    """Raises ArtifactError where native attention would bind a cache at an address that TensorRT does not take."""
    if manifest.attention == "plugin" or manifest.limits.max_batch == 1:
        return
    for name, dims in (("target", manifest.target_dims), ("drafter", manifest.drafter_dims)):
        size = CacheShape.of(dims, manifest.limits, PRECISIONS[manifest.precision].value_bytes).slot_bytes
        if size % buffers.ALIGNMENT:
            raise ArtifactError(
                f"{directory}: a slot of the {name}'s cache is {size} bytes, expected a multiple of "
                f"{buffers.ALIGNMENT}; rebuild with: {rebuild_command(directory, manifest)}"
            )


def _fill(device: Device, stored: Tables, layout: Layout, addresses: Mapping[str, int]) -> dict[str, int]:
    """Upload the tables and clear what passes read before it is written; the tables' addresses by their names."""
    tables: dict[str, int] = {}
    for table, source in stored.sources.items():
        tables[table] = addresses[_BUFFERS[table]]
        upload = stored.upload_single if table.endswith(names.HEAD) else stored.upload
        upload(source, device, tables[table])
    # Zeros: rows that were never written are multiplied by weights of zero, and a NaN in them would remain NaN. An idle
    # slot of a pass writes rows of what is in the buffer for context.
    for cleared in (buffers.TARGET_KV, buffers.DRAFTER_KV, buffers.CONTEXT):
        if cleared in addresses:
            device.clear(addresses[cleared], layout.sizes[cleared])
    device.synchronize()
    return tables


def _plain_context(trt: Any, engine: Any, captured: bool) -> Any:
    """An execution context of TensorRT without memory, or None."""
    return engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)


def _layout(manifest: Manifest, stored: Tables, candidates: int | None, workspace: int) -> Layout:
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
    dims, limits = manifest.drafter_dims if name == "drafter" else manifest.target_dims, manifest.limits
    cache = CacheShape.of(dims, limits, PRECISIONS[manifest.precision].value_bytes)
    pasts = names.past_names(dims.num_layers)
    leading: tuple[int, ...]
    if name != "compaction":
        leading = (limits.max_batch if manifest.attention == "plugin" else -1,)
    elif manifest.attention == "plugin":
        pasts, leading = [names.PAST_CACHE], (-1, cache.stored_slots)
    else:
        leading = (1,)
    wanted = (*leading, *cache.slot_shape)
    for tensor in pasts:
        shape = tuple(engine.get_tensor_shape(tensor)) if tensor in found else None
        if shape != wanted:
            raise ArtifactError(f"{directory}: {tensor} of the {name} should be {wanted}, found {shape}; {rebuild}")
