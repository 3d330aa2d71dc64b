"""Plain-torch Qwen3 target and DFlash drafter; `ddtree_trt.models` says which tensors they have.

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

from ddtree_trt.drafters import tapped
from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.tapped import TO_TARGET
from ddtree_trt.models.decoder import BODY, HEAD, Shapes, TransformerDims, decoder_layer, final_norm, shapes_of
from ddtree_trt.models.families import CONFIG_NAMES
from ddtree_trt.models.rotary import rotary_tables

Config = dict[str, Any]
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [N, Hkv, S, D]."""

ROPE_THETA = 10000.0
MAX_POSITIONS = 2048
ROTARY_ROWS = 8192  # a configuration may allow positions by the hundred thousand


def rope_table(positions: int, head_dim: int, theta: float = ROPE_THETA) -> KeyValue:
    """Cosines and sines [positions, D] of rotary embedding, both halves of D alike."""
    cos, sin = (torch.from_numpy(table) for table in rotary_tables(head_dim, theta, positions))
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, S, D]; cos and sin, in float32 whatever x is, broadcast to it."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


def dims_of(cfg: Config) -> TransformerDims:
    """The sizes in a configuration that this package wrote, which has all of them."""
    return TransformerDims(**{field: cfg[name] for field, name in CONFIG_NAMES.items()})


def add_weights(module: nn.Module, shapes: Shapes, eps: float) -> None:
    """Give a module the weights of a checkpoint by their names: a matrix is a projection, a vector a norm.

    In the order given, which `parameters()` has too and training states are saved in.
    """
    for name, shape in shapes.items():
        made = nn.Linear(shape[1], shape[0], bias=False) if len(shape) == 2 else nn.RMSNorm(shape, eps=eps)
        module.add_module(name.removesuffix(".weight"), made)


def below(shapes: Shapes, prefix: str) -> Shapes:
    """Shapes of the tensors whose names begin with a prefix, by names without it; matrices first."""
    found = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


class Attention(nn.Module):
    """Grouped-query attention with per-head RMS norm on queries and keys."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm

    def __init__(self, shapes: Shapes, dims: TransformerDims) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = dims.num_heads, dims.num_kv_heads, dims.head_dim
        add_weights(self, shapes, dims.rms_norm_eps)

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

    def mix_blocks(self, q: Tensor, k: Tensor, v: Tensor, context: KeyValue, seen: Tensor) -> Tensor:
        """Each of A blocks attends to its own positions and to the first `seen` [N, A] of P context rows; [N, S, H].

        q [N, Hq, S, D], k and v [N, Hkv, S, D], S positions in A equal blocks; context [N, Hkv, P, D]. One mask over
        context and all blocks would spend most of its time on positions that other blocks own.
        """
        (count, kv_heads, length, size), blocks = k.shape, seen.shape[1]
        shape = (count, kv_heads, -1, blocks, length // blocks, size)
        q = (q * size**-0.5).view(shape).transpose(2, 3)  # [N, Hkv, A, queries per key, B, D]
        group, rows = q.shape[3], (count, kv_heads, blocks, -1)
        q = q.reshape(count, kv_heads, -1, size)
        hidden = torch.arange(context[0].shape[2], device=q.device) >= seen[:, None, :, None, None]
        past = (q @ context[0].mT).view(*rows, hidden.shape[-1]).masked_fill(hidden, -torch.inf)
        own = q.view(*rows, size) @ k.view(*rows, size).mT
        weights = torch.softmax(torch.cat([past, own], -1), -1)
        past, own = weights.split([past.shape[-1], own.shape[-1]], -1)
        out = (past.flatten(2, 3) @ context[1]).view(*rows, size) + own @ v.view(*rows, size)
        out = out.view(count, kv_heads, blocks, group, -1, size).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(count, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, shapes: Shapes, eps: float) -> None:
        super().__init__()
        add_weights(self, shapes, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Weights of one pre-norm block; the models below spell out how they use it."""

    input_layernorm: nn.RMSNorm
    post_attention_layernorm: nn.RMSNorm

    def __init__(self, dims: TransformerDims, index: int) -> None:
        super().__init__()
        shapes = below(shapes_of(decoder_layer(dims, index)), f"{BODY}layers.{index}.")
        self.self_attn = Attention(below(shapes, "self_attn."), dims)
        self.mlp = FeedForward(below(shapes, "mlp."), dims.rms_norm_eps)
        norms = {name: shape for name, shape in shapes.items() if not name.startswith(("self_attn.", "mlp."))}
        add_weights(self, norms, dims.rms_norm_eps)


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
        self.dims = dims_of(cfg)
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

    norm: nn.RMSNorm

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.embed_tokens = nn.Embedding(*self.dims.table)
        self.layers = Layers(Layer(self.dims, index) for index in range(self.dims.num_layers))
        add_weights(self, below(shapes_of([final_norm(self.dims)]), BODY), self.dims.rms_norm_eps)

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


class MarkovHead(nn.Module):
    """DSpark's addition to the logits of a position: W2·W1[the token before it]."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """before [...], the ids of the tokens before -> [..., V]."""
        return self.markov_w2(self.markov_w1(before))


class Drafter(Rotary):
    """DFlash: a block of masks reads keys and values projected from the target's tapped states.

    With `markov_rank` in its configuration it is DSpark: `markov_head` adds to the logits.
    """

    norm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    fc: nn.Linear

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        section = cfg[dflash.SECTION]
        dims = dflash.DFlashDims(
            **vars(self.dims),
            block_size=cfg["block_size"],
            mask_token_id=section["mask_token_id"],
            tap_layers=tuple(section["target_layer_ids"]),
            num_target_layers=cfg["num_target_layers"],
        )
        self.taps = dims.tap_layers
        self.layers = Layers(Layer(dims, index) for index in range(dims.num_layers))
        parts = (final_norm(dims, tapped.BODY), dflash.context_norm(dims), dflash.DFlash(dims).fc)
        add_weights(self, shapes_of(parts), dims.rms_norm_eps)
        rank = section.get("markov_rank", 0)
        self.markov_head = MarkovHead(dims.vocab_size, rank) if rank else None

    def context(self, taps: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values [N, Hkv, S, D] per layer of context positions; taps [N, S, K*H]."""
        hidden = self.hidden_norm(self.fc(taps))
        cos, sin = self.rope(positions)
        return [layer.self_attn.keys_values(hidden, cos, sin) for layer in self.layers]

    def forward(self, block: Tensor, positions: Tensor, context: list[KeyValue], seen: Tensor | None = None) -> Tensor:
        """Final normed states [N, S, H] of block embeddings [N, S, H].

        seen [N, A]: S holds A blocks, each of which sees itself and that many context rows; None is one block that
        sees all of them.
        """
        cos, sin = self.rope(positions)
        x = block
        if seen is None:
            seen = torch.full((len(block), 1), context[0][0].shape[2], device=block.device)
        for layer, past in zip(self.layers, context, strict=True):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            q, (k, v) = attn.queries(h, cos, sin), attn.keys_values(h, cos, sin)
            x = x + attn.mix_blocks(q, k, v, past, seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def load_target(folder: Path) -> Target:
    """A frozen fp32 target from a Hugging Face folder."""
    model = Target(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    weights.pop(HEAD, None)
    model.load_state_dict({name.removeprefix(BODY): value.float() for name, value in weights.items()})
    return model.requires_grad_(False).eval()


def load_drafter(folder: Path) -> Drafter:
    """A frozen fp32 drafter from its folder."""
    model = Drafter(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    weights.pop(TO_TARGET, None)  # the tokens it drafts from, which no layer depends on
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.requires_grad_(False).eval()
