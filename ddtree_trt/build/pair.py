"""A target and its drafter: as their configurations describe them, and opened with their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ddtree_trt.artifact.backends import BACKENDS, BackendName
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.build.backends.onnxruntime.backend import weight_bytes
from ddtree_trt.build.checkpoint.outline import Outline
from ddtree_trt.build.checkpoint.quantization import MODELOPT_CONFIG
from ddtree_trt.build.sources import Source, locate
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import TransformerDims

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint

# The reader is imported where it is used: NumPy has no place in `ddtree-trt --help`.

_Network = TypeVar("_Network", bound=Outline)


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, which fit each other."""

    target: Outline
    drafter: Outline

    def weights_bytes(self, name: BackendName, precision: PrecisionName) -> int:
        """Bytes of both networks' weights in an engine. Of plans without the heads, which `device/memory.py`
        counts as they are on the device."""
        backend, size = BACKENDS[name], PRECISIONS[precision].value_bytes
        if backend.on_cpu:
            return weight_bytes(self.target, precision) + weight_bytes(self.drafter, precision)
        if backend.plans:
            return self.target.without_head().stored_bytes(size) + size * self.drafter.without_head().num_values
        return size * (self.target.num_values + self.drafter.num_values)

    def bytes_on_disk(self, name: BackendName, precision: PrecisionName) -> int:
        """About the bytes that building an engine takes."""
        if BACKENDS[name].plans:
            # While a network is compiled its weights are on disk twice: as the parser reads them, and in the plan.
            return 2 * self.target.stored_bytes(2) + 2 * self.drafter.num_values
        return self.weights_bytes(name, precision)


def outline_pair(target: Source, drafter: Source) -> Pair:
    """The networks of these sources. Of the hub only configurations are fetched. Raises CheckpointError for a
    configuration that cannot be used and for networks that do not fit each other."""
    from ddtree_trt.build.checkpoint.config import CONFIG
    from ddtree_trt.build.checkpoint.reader import load_config

    def outline(source: Source, option: str) -> Outline:
        found = locate(source, option, [CONFIG, MODELOPT_CONFIG])
        config = load_config(found.path)
        shapes = checkpoint_shapes(config.dims, tied=config.tied)
        return Outline(found.name, config.dims, shapes, config.quantization, config.dialect.skipped)

    return Pair(*_fitting(target, drafter, outline))


def open_pair(target: Source, drafter: Source) -> tuple[Checkpoint, Checkpoint]:
    """Target and drafter, with what the drafter takes from the target. Raises CheckpointError."""
    from ddtree_trt.build.checkpoint.reader import load_checkpoint

    def opened(source: Source, option: str) -> Checkpoint:
        found = locate(source, option)
        return load_checkpoint(found.path, name=found.name, revision=found.revision)

    return _fitting(target, drafter, opened)


def _fitting(target: Source, drafter: Source, read: Callable[[Source, str], _Network]) -> tuple[_Network, _Network]:
    first, second = read(target, "--checkpoint"), read(drafter, "--drafter")
    second = replace(second, dims=second.kind.fitted(first.dims))
    if second.kind.borrowed_rows:
        second = second.with_rows_of_head(first)
    check_pair(first, second)
    return first, second


def check_pair(target: Outline, drafter: Outline) -> None:
    """Raises CheckpointError when the drafter was not made for a target of this kind; says which number differs."""
    if target.kind.record is not TransformerDims:
        raise CheckpointError(f"{target.name} is a {target.kind.title}, not a target; give it as --drafter")
    if drafter.dims.delta:
        found = "has gated delta-net layers, which are not implemented in drafters"
        raise CheckpointError(f"drafter {drafter.name} {found}; use one whose layers all have attention")
    if problem := drafter.kind.misfit(target.dims):
        raise CheckpointError(f"drafter {drafter.name}: {problem}; use the drafter trained for this target")
