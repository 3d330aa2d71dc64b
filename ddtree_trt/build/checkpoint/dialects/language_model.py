"""Language models: targets, and drafters that are one."""

from __future__ import annotations

from ddtree_trt.build.checkpoint.dialects.dialect import Dialect, Known
from ddtree_trt.build.checkpoint.layer_types import refuse_windows
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Fields


def _dims(fields: Fields, dims: TransformerDims, family: Family) -> TransformerDims:
    refuse_windows(fields, family, dims.num_layers)
    return dims


LANGUAGE_MODEL = Dialect(
    title="other checkpoints",
    architectures=(),
    fields=Known(neutral={"is_causal": (True,), "is_decoder": (True, False)}),
    read_dims=_dims,
)
