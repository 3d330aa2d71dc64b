"""The graph of a drafter of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from ddtree_trt.artifact import tensors as names
from ddtree_trt.build.graph.drafter_network import build_drafter_graph
from ddtree_trt.build.graph.eagle import build_eagle_graph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.models.drafters.kinds import KindName

if TYPE_CHECKING:
    from onnx import ModelProto

    from ddtree_trt.artifact.manifest import Limits
    from ddtree_trt.build.checkpoint.reader import Checkpoint
    from ddtree_trt.build.graph.ops import Graph
    from ddtree_trt.models.drafters.dflash import DrafterDims
    from ddtree_trt.models.drafters.eagle3 import Eagle3Dims


def build_drafter(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    """The graph of a drafter for this target, lowered by `g`."""
    return _BUILDERS[drafter.kind.name](g, drafter, target, limits)


def _dflash(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    return build_drafter_graph(
        g,
        cast("DrafterDims", drafter.dims),
        drafter.tensor,
        target_weights=target.tensor,
        target_tied=target.tie_word_embeddings,
        limits=limits,
    )


def _autoregressive(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    tied = drafter.tie_word_embeddings
    return build_target_graph(
        g, drafter.dims, drafter.tensor, tap_layers=(), limits=limits, tied=tied, prefix=names.DRAFTER
    )


def _eagle3(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    dims = cast("Eagle3Dims", drafter.dims)
    return build_eagle_graph(
        g,
        dims,
        drafter.tensor,
        target_weights=target.tensor,
        target_tied=target.tie_word_embeddings,
        limits=limits,
    )


_BUILDERS: Mapping[KindName, Callable[[Graph, Checkpoint, Checkpoint, Limits], ModelProto]] = {
    "dflash": _dflash,
    "autoregressive": _autoregressive,
    "eagle3": _eagle3,
}
