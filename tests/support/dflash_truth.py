"""The DFlash drafter stated plainly in PyTorch, and what a block drafter must never ask for."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from numerics import Array, Truth
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.runtime.engines.base import DrawnFrom


class DFlash:
    """DFlash in float32, all of it computed anew from the tapped states of every committed token.

    The states pass through `fc` and a norm, and stand as context in every layer: keys and values come from context and
    block, queries from the block [bonus, MASK × L], and nothing is masked. Embedding and head are the target's.
    """

    def __init__(self, directory: Path, dims: DrafterDims, truth: Truth) -> None:
        self.dims = dims
        self.config = AutoConfig.from_pretrained(directory)
        self.w = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
        self.embed, self.head = (m.weight.detach() for m in (truth.model.model.embed_tokens, truth.model.lm_head))

    def __call__(self, states: Array, bonus: int) -> Array:
        """Log-probabilities [L, V] from the states [C, M·H] of all C committed tokens."""
        d, w = self.dims, self.w
        context = self.norm(torch.tensor(states) @ w["fc.weight"].T, "hidden_norm")
        x = self.embed[[bonus] + [d.mask_token_id] * (d.block_size - 1)]
        for i in range(d.num_layers):
            layer = f"layers.{i}"
            x = x + self.attention(layer, context, self.norm(x, f"{layer}.input_layernorm"))
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            gate, up, down = (w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = x + (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
        logits = self.norm(x, "norm")[1:] @ self.head.T
        return functional.log_softmax(logits, dim=-1).numpy()

    def attention(self, layer: str, context: Tensor, block: Tensor) -> Tensor:
        d = self.dims
        both = torch.cat([context, block])
        positions = torch.arange(len(both))
        query = self.turn(self.heads(layer, "q", block), positions[len(context) :])
        key = self.turn(self.heads(layer, "k", both), positions)
        value = self.heads(layer, "v", both)
        key, value = (t.repeat_interleave(d.num_heads // d.num_kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(d.head_dim)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
        return seen.flatten(1) @ self.w[f"{layer}.self_attn.o_proj.weight"].T

    def heads(self, layer: str, part: str, rows: Tensor) -> Tensor:
        """Queries, keys or values [rows, heads, D], the first two normed per head, and with a bias where the checkpoint
        has those tensors."""
        projection, norm = f"{layer}.self_attn.{part}_proj", f"{layer}.self_attn.{part}_norm"
        x = rows @ self.w[f"{projection}.weight"].T + self.w.get(f"{projection}.bias", torch.zeros(1))
        x = x.unflatten(-1, (-1, self.dims.head_dim))
        return self.norm(x, norm) if f"{norm}.weight" in self.w else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.dims.rms_norm_eps) * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding: halves (a, b) of each head, as complex a + ib, turned by position · θ^(−2j/D), or by
        transformers' own scaled frequencies."""
        half = self.dims.head_dim // 2
        speed = self.dims.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        magnitude = 1.0
        if self.dims.rope_scaling:
            speed, magnitude = ROPE_INIT_FUNCTIONS[self.dims.rope_scaling.rope_type](self.config, "cpu")
        angle = positions[:, None, None] * speed.double()
        turn = torch.polar(torch.full_like(angle, magnitude), angle)
        turned = torch.complex(*x.double().split(half, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).float()


def refuse_to_draw(*_: object) -> DrawnFrom:
    raise AssertionError("a block drafter draws nothing")
