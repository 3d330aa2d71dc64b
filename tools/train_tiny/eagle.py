"""Plain-torch EAGLE-3 drafter: one layer over [embedding of a token; feature of the one before], its feature fed back.

The feature of position p is the projection of the target's tapped states there, or, where the target has not been, the
layer's own output. Row p joins it with the embedding of the token at p + 1 and names the token at p + 2.

Dimension letters as in `model.py`; A rows, of which each is the first of a chain of drafts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddtree_trt.models.decoder import Shapes

from .model import Config, FeedForward, KeyValue, Rotary, Target, add_weights, rotate

ARCHITECTURE = "LlamaForCausalLMEagle3"


class Attention(nn.Module):
    """Grouped-query attention over inputs of twice the width, with no norm of heads."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        hidden, size = cfg["hidden_size"], cfg["head_dim"]
        self.heads, self.kv_heads, self.size = cfg["num_attention_heads"], cfg["num_key_value_heads"], size
        queries, keys = self.heads * size, self.kv_heads * size
        shapes: Shapes = {
            "q_proj.weight": (queries, 2 * hidden),
            "k_proj.weight": (keys, 2 * hidden),
            "v_proj.weight": (keys, 2 * hidden),
            "o_proj.weight": (hidden, queries),
        }
        add_weights(self, shapes, cfg["rms_norm_eps"])

    def keys_values(self, x: Tensor, rope: KeyValue) -> KeyValue:
        """x [N, S, 2H] -> rotated keys and plain values [N, Hkv, S, D]."""
        k, v = (p(x).view(*x.shape[:2], self.kv_heads, self.size).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return rotate(k, *rope), v

    def queries(self, x: Tensor, rope: KeyValue) -> Tensor:
        """x [N, A, 2H] -> rotated, scaled queries [N, Hkv, G, A, D], G of them for a key."""
        q = rotate(self.q_proj(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2), *rope) * self.size**-0.5
        return q.view(len(q), self.kv_heads, -1, *q.shape[2:])

    def forward(self, q: Tensor, past: KeyValue, seen: Tensor, own: list[KeyValue]) -> Tensor:
        """Attend and project to [N, A, H]: each row sees its part of `past` and its own chain.

        past [N, Hkv, T, D] and seen [N, A, T]; own: keys and values [N, Hkv, A, D] of every step of the chains, one for
        each row.
        """
        scores = [(q @ past[0].unsqueeze(2).mT).masked_fill(~seen[:, None, None], -torch.inf)]
        scores += [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.softmax(torch.cat(scores, -1).float(), -1).to(q.dtype)
        out = weights[..., : past[0].shape[2]] @ past[1].unsqueeze(2)
        for step, (_, v) in enumerate(own, past[0].shape[2]):
            out = out + weights[..., step, None] * v.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class MidLayer(nn.Module):
    """The one layer: norms of both halves of its input, attention, SwiGLU."""

    hidden_norm: nn.RMSNorm
    input_layernorm: nn.RMSNorm
    post_attention_layernorm: nn.RMSNorm

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        hidden, inner, eps = cfg["hidden_size"], cfg["intermediate_size"], cfg["rms_norm_eps"]
        self.self_attn = Attention(cfg)
        shapes: Shapes = {f"{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        self.mlp = FeedForward({**shapes, "down_proj.weight": (hidden, inner)}, eps)
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        add_weights(self, {f"{name}.weight": (hidden,) for name in norms}, eps)

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The attention's input [N, S, 2H]."""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], -1)

    def finish(self, features: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output of its features and the attention's [N, S, H]: the next features."""
        x = features + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(Rotary):
    """The drafter. Its embedding is the target's, and so is its head unless `draft_vocab_size` says that it has one."""

    norm: nn.RMSNorm
    fc: nn.Linear
    lm_head: nn.Linear | None

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        hidden = cfg["hidden_size"]
        self.taps: tuple[int, ...] = tuple(cfg["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.midlayer = MidLayer(cfg)
        self.register_module("lm_head", None)
        shapes: Shapes = {"fc.weight": (hidden, len(self.taps) * hidden), "norm.weight": (hidden,)}
        if "draft_vocab_size" in cfg:
            shapes["lm_head.weight"] = (cfg["draft_vocab_size"], hidden)
        add_weights(self, shapes, cfg["rms_norm_eps"])

    def logits(self, target: Target, features: Tensor) -> Tensor:
        """[..., V] of the layer's outputs [..., H]."""
        states = self.norm(features)
        if self.lm_head is not None:
            return self.lm_head(states).float()
        return target.head(states.to(target.norm.weight.dtype)).float()

    def context(self, target: Target, taps: Tensor, ids: Tensor) -> tuple[Tensor, KeyValue]:
        """Features [N, T, H] of positions that the target has seen, and their keys and values.

        taps [N, T, K*H]; ids [N, T] of the tokens after each of those positions.
        """
        features = self.fc(taps)
        joined = self.midlayer.join(target.embed_tokens(ids).to(features.dtype), features)
        return features, self.midlayer.self_attn.keys_values(joined, self.rope(torch.arange(taps.shape[1])))

    def unroll(self, target: Target, features: Tensor, past: KeyValue, rows: Tensor, before: Tensor) -> Tensor:
        """Features [N, A, S, H] that name the tokens after `before` [N, A, S], each step fed with the one before it.

        rows [N, A] are positions of `features` [N, T, H] and `past`: a row's first step sees those up to itself, its
        later steps also the row's own chain.
        """
        attention, found, own = self.midlayer.self_attn, [], list[KeyValue]()
        x = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))
        seen = torch.arange(past[0].shape[2]) <= rows[..., None]
        for step in range(before.shape[-1]):
            rope = self.rope(rows + step)
            joined = self.midlayer.join(target.embed_tokens(before[..., step]).to(x.dtype), x)
            if step:  # the first step's are in `past`
                own.append(attention.keys_values(joined, rope))
            x = self.midlayer.finish(x, attention(attention.queries(joined, rope), past, seen, own))
            found.append(x)
        return torch.stack(found, 2)


def fresh(target: Target, cfg: Config, seed: int) -> Eagle3:
    """Start from the target's last layer, which reads the feature's half of the input; `fc` passes the deepest tap.

    Queries and keys have no norm here: the target's norms are made part of its matrices, for inputs of random sign.
    """
    torch.manual_seed(seed)
    model, source, hidden = Eagle3(cfg), list(target.layers)[-1], cfg["hidden_size"]
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
        mine, theirs = model.midlayer.self_attn, source.self_attn
        for name, norm in (("q_proj", theirs.q_norm), ("k_proj", theirs.k_norm), ("v_proj", None)):
            weight = getattr(theirs, name).weight.clone()
            if norm is not None:
                heads = weight.view(-1, mine.size, hidden)
                heads /= heads.norm(dim=(1, 2), keepdim=True) / math.sqrt(mine.size)
                heads *= norm.weight[:, None]
            getattr(mine, name).weight[:, hidden:] += weight
        mine.o_proj.weight.copy_(theirs.o_proj.weight)
        if model.midlayer.mlp.gate_proj.weight.shape == source.mlp.gate_proj.weight.shape:
            model.midlayer.mlp.load_state_dict(source.mlp.state_dict())
        model.midlayer.hidden_norm.load_state_dict(source.input_layernorm.state_dict())
        model.midlayer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        model.norm.load_state_dict(target.norm.state_dict())
        if model.lm_head is not None:
            model.lm_head.weight.copy_(target.embed_tokens.weight)
    return model.requires_grad_(True)


def load_eagle3(folder: Path) -> Eagle3:
    """A frozen fp32 drafter from its folder."""
    model = Eagle3(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.requires_grad_(False).eval()
