"""A build's result and memory, computed from both networks' configuration alone: nothing is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.precisions import PLAN_BACKENDS, PRECISIONS, BackendName, PrecisionName
from ddtree_trt.build.backends.onnxruntime.backend import weight_bytes
from ddtree_trt.build.backends.registry import backend_build, resolve_precision
from ddtree_trt.build.checkpoint.paths import checkpoint_name
from ddtree_trt.build.checkpoint.quantization import MODELOPT_CONFIG, Quantization
from ddtree_trt.build.compile import BuildRequest, check_numbers, resolve_limits, resolve_preset
from ddtree_trt.build.presets import PackagedSource, Source
from ddtree_trt.device.gpus import available_bytes, find_gpus
from ddtree_trt.device.memory import MemoryPlan, plan_engine
from ddtree_trt.errors import BuildError
from ddtree_trt.models.decoder import HEAD, TransformerDims
from ddtree_trt.models.pairs import checkpoint_shapes


@dataclass(frozen=True)
class DryRun:
    """The engine that a build would make."""

    name: str
    backend: BackendName
    precision: PrecisionName
    limits: Limits
    memory: MemoryPlan
    available_bytes: int | None  # of the memory it would run in; None where this machine has no such

    def check(self) -> None:
        """Raises BuildError when the engine cannot fit, with the batch that does."""
        memory, available = self.memory, self.available_bytes
        if available is None or memory.total_bytes <= available:
            return
        # Buffers and workspace grow with the slots as the cache does.
        each = (memory.total_bytes - memory.weights_bytes) / memory.slots
        slots = int((available - memory.weights_bytes) // each)
        advice = f"give --max-batch {slots}" if slots > 0 else "give a smaller --max-seq-len, or a smaller pair"
        raise BuildError(
            f"{self.name} needs about {memory.total_bytes / 1e9:.1f} GB of the {memory.place}'s memory, which has "
            f"{available / 1e9:.1f} GB; {advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "name": self.name,
            "backend": self.backend,
            "precision": self.precision,
            "limits": vars(self.limits),
            "memory": self.memory.to_dict(),
            "available_bytes": self.available_bytes,
        }


@dataclass(frozen=True)
class _Network:
    """A network as its configuration describes it."""

    name: str
    dims: TransformerDims
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    quantization: Quantization | None

    def without_head(self) -> _Network:
        return replace(self, shapes={name: shape for name, shape in self.shapes.items() if name != HEAD})

    def weights_bytes(self, item_bytes: int, *, as_stored: bool) -> int:
        """Bytes of the weights in a precision of `item_bytes`; with `as_stored` quantised ones are kept as they are."""
        quantization = self.quantization if as_stored else None
        return sum(
            quantization.weight_bytes(shape, item_bytes)
            if quantization and quantization.covers(name)
            else item_bytes * math.prod(shape)
            for name, shape in self.shapes.items()
        )


def dry_run(request: BuildRequest) -> DryRun:
    """Resolve a request as `compile_engine` would. A hub checkpoint's config.json is fetched, its weights are not.

    Raises UsageError for a wrong request and CheckpointError for a configuration that cannot be used.
    """
    # Imported here because NumPy has no place in `ddtree-trt --help`.
    from ddtree_trt.build.checkpoint.reader import check_pair

    backend = backend_build(request.backend, request.builder, dry_run=True)
    precision = resolve_precision(backend, request.precision)
    preset = resolve_preset(request)
    check_numbers(request)
    target = _describe(preset.target if preset else None, request.checkpoint, "--checkpoint")
    drafter = _describe(preset.drafter if preset else None, request.drafter, "--drafter")
    check_pair(target, drafter)
    limits = resolve_limits(request, preset.limits if preset else Limits(), target, drafter, backend)
    if backend.name == "onnxruntime":
        weights = weight_bytes(target.shapes, precision) + weight_bytes(drafter.shapes, precision)
    else:
        size, plans = PRECISIONS[precision].value_bytes, backend.name in PLAN_BACKENDS
        if plans:  # heads are counted as they are on the device
            target, drafter = target.without_head(), drafter.without_head()
        weights = target.weights_bytes(size, as_stored=plans) + drafter.weights_bytes(size, as_stored=False)
    memory = plan_engine(backend.name, precision, target.dims, drafter.dims, limits, weights)
    return DryRun(request.name, backend.name, precision, limits, memory, available_bytes(memory.place, find_gpus()))


def _describe(source: Source | None, path: Path | None, option: str) -> _Network:
    """The network that the user named, else the preset's."""
    from ddtree_trt.build.checkpoint.config import CONFIG
    from ddtree_trt.build.checkpoint.reader import load_config

    if path is not None or source is None:
        assert path is not None  # resolve_preset: without a preset both paths are given
        name = checkpoint_name(path)
    elif isinstance(source, PackagedSource):
        path, name = source.directory, source.folder
    else:
        from ddtree_trt.build.hub import download

        path, name = download(source, option, [CONFIG, MODELOPT_CONFIG]), source.repository
    config = load_config(path)
    shapes = checkpoint_shapes(config.dims, tied=config.tied)
    return _Network(name, config.dims, shapes, config.quantization)
