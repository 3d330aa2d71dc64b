"""Opening an engine directory of TensorRT or TensorRT for RTX: checks of this machine, memory, tables, then the plans.

A plan is code for one version of the library and for some kinds of GPU: of TensorRT for the one it was built on, of
TensorRT for RTX for those it was built for."""

import logging
import mmap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.files import write_atomically
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.tensor_files import StoredTensor, read_tensors
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import Layout, tensorrt_buffers
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.device.gpus import KINDS, UNSERVED
from ddtree_trt.device.libraries import (
    CurrentGpu,
    cuda_bindings,
    cuda_versions,
    current_gpu,
    import_tensorrt,
    load_plugins,
    make_log,
)
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.plugins import library
from ddtree_trt.reading import Source
from ddtree_trt.runtime.engines.passes import closed_on_failure

_log = logging.getLogger("ddtree_trt.tensorrt")


def check_machine(directory: Path, manifest: Manifest) -> tuple[Any, Any, Path | None]:
    """What the engine needs, after all checks: the module of TensorRT or of TensorRT for RTX, `cuda.bindings.runtime`,
    and the plugin library, None for native attention. Another build of a library with the same ABI is accepted.

    Raises MissingDependency for what is not installed, and ArtifactError, which names the difference and what to do.
    """
    backend = BACKENDS[manifest.backend]
    version = manifest.toolchain.get(manifest.backend, "of an unknown version")
    refusal = f"{directory} was built with {backend.title} {version}, which cannot be imported here"
    trt = import_tensorrt(refusal, rtx=backend.portable)
    cuda = cuda_bindings(backend.extra)
    _check_toolchain(directory, manifest, trt.__version__, cuda)
    if manifest.plugin is None:
        return trt, cuda, None
    for field, found in plugins.IDENTITY.items():
        if (built := manifest.plugin.get(field)) != found:
            raise ArtifactError(
                f"{directory} was built with plugin {field} {built!r}, this ddtree-trt has {found!r}; rebuild with: "
                f"{rebuild_command(directory, manifest)}"
            )
    return trt, cuda, library.find(library.PLUGINS)


def _check_toolchain(directory: Path, manifest: Manifest, version: str, cuda: Any) -> None:
    """Raises ArtifactError where TensorRT's `version`, CUDA, the driver or the GPU differs from the engine's."""
    built, backend = manifest.toolchain, BACKENDS[manifest.backend]

    def refuse(what: str, expected: str, found: str, gpu: CurrentGpu | None = None) -> ArtifactError:
        kind = "" if gpu is None else f"sm{gpu.sm}"
        if backend.portable and kind and kind not in KINDS:
            advice = f"which {UNSERVED.get(kind, f'{backend.title} does not serve')}"
        else:
            advice = f"rebuild with: {rebuild_command(directory, manifest, *filter(None, [kind]))}"
        return ArtifactError(f"{directory} was built for {what} {expected}, found {found}; {advice}")

    if built.get(manifest.backend) != version:
        raise refuse(backend.title, built.get(manifest.backend, "unknown"), version)
    if backend.portable:
        wanted = built.get("gpus", "").split()
        expected = " or ".join(wanted) or "an unknown kind"
    else:
        wanted = [f"sm{built.get('sm')}"]
        expected = f"sm_{built.get('sm')} ({built.get('gpu', 'unknown')})"
    # Before any call of TensorRT's runtime, which may end the process where no driver is installed.
    try:
        gpu = current_gpu(cuda)
    except EngineError as error:
        raise refuse("a GPU of", expected, f"none that CUDA can use ({error})") from error
    if gpu is None:
        raise refuse("a GPU of", expected, "none")
    if f"sm{gpu.sm}" not in wanted:
        raise refuse("a GPU of", expected, f"sm_{gpu.sm} ({gpu.name})", gpu)
    runtime = cuda_versions(cuda).runtime
    major = built.get("cuda", runtime).split(".")[0]  # TensorRT for RTX may be built for without CUDA
    if runtime.split(".")[0] != major:
        raise refuse("CUDA", f"{major}.x", runtime)


_PIECE_BYTES = 16 << 20  # of a table, which is uploaded piece by piece


class KernelCache:
    """One IRuntimeCache for all contexts of an engine directory."""

    def __init__(self, trt: Any, path: Path) -> None:
        """`trt` is the module of TensorRT for RTX, `path` where the cache is stored."""
        self._trt = trt
        self._path = path
        self._cache: Any = None  # made by the first engine's configuration
        self._stored = b""  # content of the file, where it is of use

    def make_context(self, engine: Any, captured: bool) -> Any:
        """An execution context without memory, or None. Those of captured passes compile kernels for their shapes at
        once: later they would take the place of kernels that a graph holds. Others get kernels that serve all shapes.
        """
        trt = self._trt
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if captured else strategies.NONE
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # passes are captured by this engine
        if self._cache is None:
            self._cache = self._load(config)
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def _load(self, config: Any) -> Any:
        """A cache with the stored kernels, or an empty one where there are none for this GPU, driver and version."""
        cache = config.create_runtime_cache()
        try:
            stored = self._path.read_bytes()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("%s cannot be read (%s): kernels are compiled anew", self._path, error.strerror or error)
            return cache
        if stored and cache.deserialize(stored):
            self._stored = stored
        else:
            _log.info("%s is of another GPU, driver or version: kernels are compiled anew", self._path)
        return cache

    def store(self) -> None:
        """Store what has been compiled since; where it cannot be written, a warning is logged."""
        if self._cache is None:
            return
        serialized = self._cache.serialize()
        content = b"" if serialized is None else bytes(memoryview(serialized))
        if content in (b"", self._stored):
            return
        try:
            write_atomically(self._path, content)
            self._stored = content
        except OSError as error:
            reason = error.strerror or error
            _log.warning("%s cannot be written (%s): kernels are compiled at every start", self._path, reason)


class Loaded:
    """The deserialised engines, and one block of device memory for all other data."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Check the machine, allocate memory and deserialise the plans. Raises the errors of `TrtEngine.open`."""
        trt, cuda, plugin_library = check_machine(directory, manifest)
        self.device = Device(cuda)
        with closed_on_failure(self.device):
            self._load(directory, manifest, trt, plugin_library)

    def _load(self, directory: Path, manifest: Manifest, trt: Any, plugin_library: Path | None) -> None:
        stored, device = _read_tables(directory, manifest), self.device
        plans = artifact.TARGET_PLAN, artifact.DRAFTER_PLAN, artifact.COMPACTION_PLAN
        dims, value_bytes = (manifest.target_dims, manifest.drafter_dims), PRECISIONS[manifest.precision].value_bytes
        plan = partial(tensorrt_buffers, *dims, manifest.limits, value_bytes)
        plan_bytes = sum(manifest.files[name].size for name in plans)
        _check_memory(directory, manifest, device, plan_bytes, Layout.of(plan()).total_bytes)
        self.log = make_log(trt, _log)
        if plugin_library is not None:
            load_plugins(trt, self.log, plugin_library, EngineError)
        runtime = trt.Runtime(self.log)
        engines = [_deserialise(runtime, self.log, directory / name, manifest) for name in plans]
        self.target, self.drafter, self.compaction = engines  # ICudaEngine each
        self.runtime = runtime  # must outlive all of them
        shape = self.drafter.get_tensor_shape(names.CANDIDATES) if manifest.drafting.block_size else (0,)
        self.candidates = int(shape[-1])  # K of a block drafter; 0 of any other
        workspace = max(int(engine.device_memory_size_v2) for engine in engines)
        self.layout = layout = Layout.of(plan(candidates=self.candidates, workspace_bytes=workspace))
        _check_memory(directory, manifest, device, 0, layout.total_bytes)  # with the workspace that TensorRT needs
        base = device.allocate(layout.total_bytes)
        self.addresses = addresses = {name: base + offset for name, offset in layout.offsets.items()}
        self.workspace = addresses[buffers.WORKSPACE], workspace
        # Zeros: rows that were never written are multiplied by weights of zero, and a NaN in them would remain NaN. An
        # idle slot of a pass writes rows of what is in the buffer for context.
        for cleared in (buffers.TARGET_KV, buffers.DRAFTER_KV, buffers.CONTEXT, buffers.TARGET_STATES, buffers.KEPT):
            if cleared in addresses:
                device.clear(addresses[cleared], layout.sizes[cleared])
        self.target_tables = tables = {name: addresses[name] for name in stored}  # input → address
        for name, table in stored.items():
            _upload(table, device, tables[name], single=name.endswith(names.HEAD))
        own = {t.removeprefix(names.DRAFTER): a for t, a in tables.items() if t.startswith(names.DRAFTER)}
        self.drafter_tables = {**tables, **own}
        self.kernel_cache: KernelCache | None = None  # of TensorRT for RTX
        without_memory = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        # (ICudaEngine, whether its passes will be captured) → an execution context without memory, or None
        self.make_context: Any = lambda engine, captured: engine.create_execution_context(without_memory)
        if BACKENDS[manifest.backend].portable:
            self.kernel_cache = KernelCache(trt, directory / artifact.KERNEL_CACHE)
            self.make_context = self.kernel_cache.make_context

    def close(self) -> None:
        """Release everything, graphs included. Contexts must have been released before."""
        if self.kernel_cache is not None:
            self.kernel_cache.store()
        for name in ("make_context", "kernel_cache", "target", "drafter", "compaction", "runtime"):
            setattr(self, name, None)  # in this order
        self.device.close()


def _read_tables(directory: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tables of shared.safetensors [V, H] by the names by which passes read them; an absent head is tied."""
    path, rebuild = directory / artifact.SHARED_WEIGHTS, f"rebuild with: {rebuild_command(directory, manifest)}"
    stored, tables = read_tensors(path, Source(f"{path} cannot be read", ArtifactError, rebuild)), {}
    for prefix, dims in {"": manifest.target_dims, names.DRAFTER: manifest.drafter_dims}.items():
        for part in kind_of(dims).own_tables:
            name = prefix + buffers.TABLES[part.name]
            tables[name] = stored[name if name in stored else prefix + names.EMBEDDING]
    return tables


def _upload(table: StoredTensor, device: Device, address: int, *, single: bool) -> None:
    """Upload a table and wait for the copy; `single`: in float32, which represents its values exactly."""
    values = table.mapped()
    step = _PIECE_BYTES // values.itemsize
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        piece = piece.astype(np.float32) if single else piece
        device.upload(address, piece)
        device.synchronize()
        address += piece.nbytes


def _check_memory(directory: Path, manifest: Manifest, device: Device, weights: int, buffers: int) -> None:
    """Raises EngineError when weights that are not loaded yet and buffers do not fit into the GPU's free memory."""
    free, total = device.free_bytes()
    if weights + buffers > free:
        raise EngineError(
            f"{directory} needs {(weights + buffers) / 1e9:.2f} GB of GPU memory, {buffers / 1e9:.2f} GB of it for "
            f"cache and buffers, {free / 1e9:.2f} GB of {total / 1e9:.2f} GB are free; end what else uses the GPU, or "
            f"rebuild with a smaller --max-batch or --max-seq-len: {rebuild_command(directory, manifest)}"
        )


def _deserialise(runtime: Any, log: Any, path: Path, manifest: Manifest) -> Any:
    log.clear()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        rebuild = rebuild_command(path.parent, manifest)
        raise ArtifactError(f"TensorRT cannot load {path}: {log.words()}; rebuild with: {rebuild}")
    return engine
