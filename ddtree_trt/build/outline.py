"""Networks as their configuration describes them: what a build and a dry run know before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddtree_trt.artifact.backends import BACKENDS, BackendName
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.build.backends.onnxruntime.backend import weight_bytes
from ddtree_trt.build.checkpoint.quantization import MODELOPT_CONFIG, Quantization
from ddtree_trt.build.sources import Source, locate
from ddtree_trt.drafters.registry import checkpoint_shapes, kind_of
from ddtree_trt.models.decoder import HEAD, TransformerDims


@dataclass(frozen=True)
class Outline:
    """A network as its configuration describes it."""

    name: str
    dims: TransformerDims
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    quantization: Quantization | None

    def without_head(self) -> Outline:
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


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, which fit each other."""

    target: Outline
    drafter: Outline

    def weights_bytes(self, name: BackendName, precision: PrecisionName) -> int:
        """Bytes of both networks' weights in an engine. Of plans without the heads, which `device/memory.py`
        counts as they are on the device."""
        backend = BACKENDS[name]
        if backend.on_cpu:
            return weight_bytes(self.target, precision) + weight_bytes(self.drafter, precision)
        size, plans = PRECISIONS[precision].value_bytes, backend.plans
        target, drafter = self.target, self.drafter
        if plans:
            target, drafter = target.without_head(), drafter.without_head()
        return target.weights_bytes(size, as_stored=plans) + drafter.weights_bytes(size, as_stored=False)


def outline_pair(target: Source, drafter: Source) -> Pair:
    """The networks of these sources. Of the hub only configurations are fetched.

    Raises CheckpointError for a configuration that cannot be used and for networks that do not fit each other.
    """
    # Imported here because NumPy has no place in `ddtree-trt --help`.
    from ddtree_trt.build.checkpoint.reader import check_pair

    first, second = _outline(target, "--checkpoint"), _outline(drafter, "--drafter")
    dims = kind_of(second.dims).fitted(first.dims)
    if rows := kind_of(dims).borrowed_rows:
        second, dims = replace(second, shapes={**second.shapes, **rows}), replace(dims, own_head=True)
    pair = Pair(first, replace(second, dims=dims))
    check_pair(pair.target, pair.drafter)
    return pair


def _outline(source: Source, option: str) -> Outline:
    from ddtree_trt.build.checkpoint.config import CONFIG
    from ddtree_trt.build.checkpoint.reader import load_config

    found = locate(source, option, [CONFIG, MODELOPT_CONFIG])
    config = load_config(found.path)
    shapes = checkpoint_shapes(config.dims, tied=config.tied)
    return Outline(found.name, config.dims, shapes, config.quantization)
