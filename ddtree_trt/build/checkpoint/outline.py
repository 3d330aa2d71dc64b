"""A network as its configuration describes it: what a build and a dry run know before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ddtree_trt.build.checkpoint.quantization import Quantization
from ddtree_trt.drafters.kind import DrafterKind
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import HEAD, Shapes, TransformerDims


@dataclass(frozen=True)
class Outline:
    name: str
    dims: TransformerDims  # of the record that the kind of drafter has
    shapes: Shapes = field(repr=False)  # of all tensors' values: quantised ones may be stored packed
    quantization: Quantization | None
    skipped: str  # what of the checkpoint's model is left out, in words; "" for nothing

    @property
    def kind(self) -> DrafterKind:
        """The record of what it needs and offers as a drafter."""
        return kind_of(self.dims)

    @property
    def num_values(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def stored_bytes(self, item_bytes: int) -> int:
        """Bytes of all tensors where quantised ones are kept as stored and others have a precision of `item_bytes`."""
        return sum(
            self.quantization.weight_bytes(shape, item_bytes)
            if self.quantization and self.is_quantized(name)
            else item_bytes * math.prod(shape)
            for name, shape in self.shapes.items()
        )

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is quantised, as far as the configuration tells."""
        return self.quantization is not None and self.quantization.covers(name)

    def without_head(self) -> Outline:
        return replace(self, shapes={name: shape for name, shape in self.shapes.items() if name != HEAD})

    def with_rows_of_head(self, target: Any) -> Any:
        """This drafter with the rows of the target's head that its draft vocabulary needs, where it brings no head for
        it: the head is most of a small drafter's pass, and few tokens of a large vocabulary are worth drafting."""
        dims = replace(cast(Any, self.dims), own_head=True)
        return replace(self, dims=dims, shapes={**self.shapes, **self.kind.borrowed_rows})
