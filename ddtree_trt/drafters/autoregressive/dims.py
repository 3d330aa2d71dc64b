"""The autoregressive drafter: a language model with its own tables, whose dimensions are a target's."""

from collections.abc import Iterator

from ddtree_trt.drafters.kind import DrafterKind
from ddtree_trt.models.decoder import Part, TransformerDims, embedding, head, language_model_stored


class Autoregressive(DrafterKind):
    name = "autoregressive"
    title = "autoregressive drafter"
    record = TransformerDims
    drafts = "tokens"

    @property
    def own_tables(self) -> tuple[Part, ...]:
        return embedding(self.dims), head(self.dims)

    def stored(self, *, tied: bool) -> Iterator[Part]:
        return language_model_stored(self.dims, tied=tied)
