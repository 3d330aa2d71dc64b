"""The EAGLE-3 drafter stated plainly in PyTorch, from its published definition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numerics import Array
from torch import Tensor
from torch.nn import functional

from ddtree_trt.drafters.eagle3.dims import Eagle3Dims


class Eagle3:
    """EAGLE-3 in float32 over one sequence, computed anew for every path: no cache, no mask but the causal one.

    Row i has position i, the embedding of token i + 1 and the state of token i. States of committed tokens are tapped
    target states through `fc`; that of a drafted token is the drafter's own output in the row of the token before it.
    """

    def __init__(
        self, dims: Eagle3Dims, weights: Mapping[str, Array], target_embedding: Array, target_head: Array | None = None
    ) -> None:
        self.dims = dims
        self.w = {name: torch.tensor(np.asarray(value, np.float32)) for name, value in weights.items()}
        self.embedding = self.w["embed_tokens.weight"] if dims.own_embedding else torch.tensor(target_embedding)
        self.head = self.w["lm_head.weight"] if dims.own_head else torch.tensor(target_head)
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
        d, w, layer = self.dims, self.w, "layers.0"
        token = self.norm(self.embedding[list(tokens)], f"{layer}.input_layernorm")
        state = self.norm(states, f"{layer}.hidden_norm")
        x = state if d.norm_before_residual else states
        x = x + self.attention(torch.cat([token, state], -1))
        h = self.norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
        normed = self.norm(x, "norm")
        return normed @ self.head.T, normed if d.norm_output else x

    def attention(self, rows: Tensor) -> Tensor:
        d, count = self.dims, len(rows)
        query, key, value = (self.heads(part, rows) for part in "qkv")
        query, key = (self.turn(x) for x in (query, key))
        key, value = (t.repeat_interleave(d.num_heads // d.num_kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(d.head_dim)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
        return seen.flatten(1) @ self.w["layers.0.self_attn.o_proj.weight"].T

    def heads(self, part: str, rows: Tensor) -> Tensor:
        name = f"layers.0.self_attn.{part}"
        x = rows @ self.w[f"{name}_proj.weight"].T + self.w.get(f"{name}_proj.bias", torch.zeros(1))
        x = x.unflatten(-1, (-1, self.dims.head_dim))
        return self.norm(x, f"{name}_norm") if f"{name}_norm.weight" in self.w else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.dims.rms_norm_eps) * self.w[f"{name}.weight"]

    def turn(self, x: Tensor) -> Tensor:
        """Rotary embedding at positions 0, 1, …: halves (a, b) of each head, as complex a + ib, turned by
        position · θ^(−2j/D)."""
        half = self.dims.head_dim // 2
        speed = self.dims.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x))[:, None, None] * speed
        turned = torch.complex(*x.double().split(half, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1).float()
