"""The EAGLE-3 drafter stated plainly in PyTorch, from its published definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from dflash_truth import Layers
from numerics import Array
from torch import Tensor
from torch.nn import functional

from ddtree_trt.drafters.eagle3.dims import Eagle3Dims


class Eagle3(Layers):
    """EAGLE-3 in float32 over one sequence, computed anew for every path: no cache, no mask but the causal one.

    Row i has position i, the embedding of token i + 1 and the state of token i. States of committed tokens are tapped
    target states through `fc`; that of a drafted token is the drafter's own output in the row of the token before it.
    """

    def __init__(
        self, dims: Eagle3Dims, weights: Mapping[str, Array], target_embedding: Array, target_head: Array | None = None
    ) -> None:
        super().__init__(dims, weights)
        self.embedding = self.w["embed_tokens.weight"] if dims.own_embedding else torch.as_tensor(target_embedding)
        self.head = self.w["lm_head.weight"] if dims.own_head else torch.as_tensor(target_head)
        self.target_ids = torch.arange(dims.head_size)
        if dims.draft_vocab_size is not None:
            self.target_ids = self.target_ids + self.w["d2t"].long()

    def __call__(self, taps: Array, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Array:
        """Log-probabilities [V'] of the token behind `drafted`, for the tapped states [C, M·H] of C committed tokens
        and the C + 1 tokens with the bonus token; `self.target_ids` are the columns' ids."""
        fused = torch.tensor(taps) @ self.w["fc.weight"].T
        states, following = fused, [*tokens[1:]]
        for token in drafted:
            states = torch.cat([states, self.rows(states, following)[1][-1:]])
            following.append(token)
        return functional.log_softmax(self.rows(states, following)[0][-1], -1).numpy()

    def rows(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits [R, V'], outputs that are fed back [R, H]) of rows with these states [R, H] and tokens [R]."""
        d, layer = self.dims, "layers.0"
        token = self.norm(self.embedding[list(tokens)], f"{layer}.input_layernorm")
        state = self.norm(states, f"{layer}.hidden_norm")
        x = state if d.norm_before_residual else states
        x = x + self.attend(layer, torch.cat([token, state], -1), torch.ones(len(x), len(x)).triu(1).bool())
        h = self.norm(x, f"{layer}.post_attention_layernorm")
        x = x + self.mlp(layer, h)
        normed = self.norm(x, "norm")
        return normed @ self.head.T, normed if d.norm_output else x
