"""Plain-torch Qwen3 target and DFlash drafter whose tensor names are those of the Hugging Face checkpoints.

Dimension letters: N sequences, S positions in this pass, P positions already cached, H hidden size, Hq/Hkv query and
key-value heads, D head size, V vocabulary, K number of tapped target layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

Config = dict[str, Any]
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [N, Hkv, S, D]."""

ROPE_THETA = 10000.0
MAX_POSITIONS = 2048
ROTARY_ROWS = 8192  # a configuration may allow positions by the hundred thousand


def rope_table(positions: int, head_dim: int, theta: float = ROPE_THETA) -> KeyValue:
    """Cosines and sines [positions, D] of rotary embedding, both halves of D alike."""
    inverse = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(positions).float(), inverse)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, S, D]; cos and sin, in float32 whatever x is, broadcast to it."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with per-head RMS norm on queries and keys."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, S, H] -> rotated queries [N, Hq, S, D]."""
        q = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.heads, self.head_dim))
        return rotate(q.transpose(1, 2), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """x [N, S, H] -> rotated keys and plain values, each [N, Hkv, S, D]."""
        k = self.k_norm(self.k_proj(x).view(*x.shape[:2], self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(*x.shape[:2], self.kv_heads, self.head_dim)
        return rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend and project to [N, S, H]; without a mask the pass is causal over its own positions."""
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return self.o_proj(out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Weights of one pre-norm block; the models below spell out how they use it."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        hidden, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        heads = (cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"])
        self.self_attn = Attention(hidden, *heads, eps)
        self.mlp = FeedForward(hidden, cfg["intermediate_size"])
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)


class Layers(nn.ModuleList):
    def __iter__(self) -> Iterator[Layer]:
        return cast(Iterator[Layer], super().__iter__())


class Rotary(nn.Module):
    """Base of both models: holds the rotary table, of at most ROTARY_ROWS rows, outside the checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        rows = min(ROTARY_ROWS, cfg["max_position_embeddings"])
        cos, sin = rope_table(rows, cfg["head_dim"], cfg["rope_theta"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rope(self, positions: Tensor) -> KeyValue:
        """positions [S] or [N, S] -> cos, sin that broadcast to [N, heads, S, D]."""
        cos, sin = self.cos[positions], self.sin[positions]
        return (cos[:, None], sin[:, None]) if positions.dim() == 2 else (cos, sin)


class Target(Rotary):
    """Qwen3 with tied embeddings."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        hidden = cfg["hidden_size"]
        self.embed_tokens = nn.Embedding(cfg["vocab_size"], hidden)
        self.layers = Layers(Layer(cfg) for _ in range(cfg["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final normed states [..., H]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def new_cache(self, sequences: int, capacity: int) -> list[KeyValue]:
        """Zeroed keys and values [N, Hkv, capacity, D] per layer."""
        shape = (sequences, self.cfg["num_key_value_heads"], capacity, self.cfg["head_dim"])
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]

    def forward(
        self,
        ids: Tensor,
        taps: tuple[int, ...] = (),
        cache: list[KeyValue] | None = None,
        past: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Final normed states [N, S, H] and the tapped layers' outputs side by side [N, S, K*H].

        ids [N, S]; rows past..past+S of the cache are written; mask [S, P+S] is True where a position may look.
        Without a mask the pass must be a prefill (past 0) or a single token.
        """
        length = ids.shape[1]
        if mask is None and past and length > 1:
            raise ValueError(f"{length} new positions after {past} cached ones need a mask")
        cos, sin = self.rope(torch.arange(past, past + length) if positions is None else positions)
        x = self.embed_tokens(ids)
        tapped: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            q, (k, v) = attn.queries(h, cos, sin), attn.keys_values(h, cos, sin)
            if cache is not None:
                all_k, all_v = cache[index]
                all_k[:, :, past : past + length], all_v[:, :, past : past + length] = k, v
                k, v = all_k[:, :, : past + length], all_v[:, :, : past + length]
            x = x + attn.mix(q, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else x[..., :0]


class Drafter(Rotary):
    """DFlash: a block of masks reads keys and values projected from the target's tapped states."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        hidden, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.taps: tuple[int, ...] = tuple(cfg["dflash_config"]["target_layer_ids"])
        self.layers = Layers(Layer(cfg) for _ in range(cfg["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)

    def context(self, taps: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values [N, Hkv, S, D] per layer of context positions; taps [N, S, K*H]."""
        hidden = self.hidden_norm(self.fc(taps))
        cos, sin = self.rope(positions)
        return [layer.self_attn.keys_values(hidden, cos, sin) for layer in self.layers]

    def forward(self, block: Tensor, positions: Tensor, context: list[KeyValue], mask: Tensor | None) -> Tensor:
        """Final normed states [N, S, H] of block embeddings [N, S, H].

        mask [N, 1, S, P+S] or [S, P+S] is True where a block position may look; None is all of context and block.
        """
        cos, sin = self.rope(positions)
        x = block
        if mask is None:
            mask = torch.ones(block.shape[1], context[0][0].shape[2] + block.shape[1], dtype=torch.bool)
        for layer, (ctx_k, ctx_v) in zip(self.layers, context, strict=True):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            q, (k, v) = attn.queries(h, cos, sin), attn.keys_values(h, cos, sin)
            x = x + attn.mix(q, torch.cat([ctx_k, k], 2), torch.cat([ctx_v, v], 2), mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def load_target(folder: Path) -> Target:
    """A frozen fp32 target from a Hugging Face folder."""
    model = Target(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model.requires_grad_(False).eval()


def load_drafter(folder: Path) -> Drafter:
    """A frozen fp32 drafter from its folder."""
    model = Drafter(json.loads((folder / "config.json").read_text()))
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model.requires_grad_(False).eval()
