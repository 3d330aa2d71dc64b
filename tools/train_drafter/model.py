"""The drafters in plain PyTorch, with the tensors of their published checkpoints: DFlash, DSpark and EAGLE-3.

Letters: N sequences, T tokens of the longest, A anchors a sequence, B block size (of EAGLE-3 one more than its steps),
H hidden size, Hq/Hkv query and key-value heads, G queries a key, D head size, V vocabulary, K tapped target layers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP

from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.tapped import TO_TARGET

from .blocks import Blocks

SHORTLIST = "draft_vocab_size"  # in a configuration
BOLD = 4.0  # how many times as far as another weight's a step moves a projection

Config = dict[str, Any]
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [N, Hkv, S, D]."""


class Rotary(nn.Module):
    """Base of the drafters: rotary embedding, in float32 whatever the weights are."""

    frequencies: Tensor

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        halves = torch.arange(0, cfg["head_dim"], 2) / cfg["head_dim"]
        self.register_buffer("frequencies", cfg["rope_theta"] ** -halves, persistent=False)

    def rope(self, positions: Tensor) -> KeyValue:
        """Cosines and sines of positions [N, S], to be multiplied with [N, heads, S, D]."""
        angles = (positions[:, None, :, None].float() * self.frequencies).repeat(1, 1, 1, 2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, S, D]."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class MarkovHead(nn.Module):
    """DSpark's addition to the logits of a position: W2·W1[the token before it]. It adds nothing at first.

    Between `project` and `settle` its weights are [H, r], and the tables the target's times them: free ones learn the
    answers by heart. W2 may have fewer tokens, V', those of a shortlist.
    """

    def __init__(self, vocabulary: int, rank: int, drafted: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        self.targets: Callable[[], tuple[Tensor, Tensor]] | None = None  # a function is not copied with the module

    def project(self, tables: tuple[Tensor, Tensor], given: Any = None, ids: Tensor | None = None) -> None:
        """`tables`: the target's. Begins anew, or as the head `given`, whose W2 is of the tokens `ids`, or of all."""
        self.targets, self.scales = lambda: tables, [BOLD / float(table.float().std()) for table in tables]
        left = torch.randn(tables[0].shape[1], self.markov_w1.embedding_dim) / tables[0].shape[1] ** 0.5 / BOLD
        right = torch.zeros_like(left)
        if given is not None:
            known = tables[0].cpu(), tables[1].cpu() if ids is None else tables[1].cpu()[ids]
            parts = zip(known, given.tables, self.scales, strict=True)
            left, right = (torch.linalg.lstsq(s * a.float(), b.float()).solution for a, b, s in parts)
        self.markov_w1.weight, self.markov_w2.weight = nn.Parameter(left), nn.Parameter(right)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """W1 [V, r] and W2 [V', r]."""
        left, right = self.markov_w1.weight, self.markov_w2.weight
        if self.targets is None:
            return left, right
        (one, two), (a, b) = self.targets(), self.scales
        return one.to(left.dtype) @ (left * a), two.to(right.dtype) @ (right * b)

    def settle(self) -> None:
        """Have the tables as weights that learn no more, as they are exported."""
        tables, self.targets = self.tables, None
        self.markov_w1.weight, self.markov_w2.weight = (nn.Parameter(table, False) for table in tables)

    def forward(self, before: Tensor) -> Tensor:
        """before [...], the ids of the tokens before -> [..., V']."""
        left, right = self.tables
        return F.embedding(before, left) @ right.T


class DFlash(Rotary):
    """A block of masks reads keys and values projected from the target's tapped states.

    With `markov_rank` in its configuration it is DSpark: `markov_head` adds to the logits.
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        section, hidden = cfg[dflash.SECTION], cfg["hidden_size"]
        self.block, self.mask = int(cfg["block_size"]), int(section["mask_token_id"])
        self.window = int(cfg["sliding_window"] or 0)
        shape = Qwen3Config(**{name: value for name, value in cfg.items() if name != "architectures"})
        self.layers = nn.ModuleList(Qwen3DecoderLayer(shape, index) for index in range(cfg["num_hidden_layers"]))
        self.norm, self.hidden_norm = (nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"]) for _ in range(2))
        self.fc = nn.Linear(len(section["target_layer_ids"]) * hidden, hidden, bias=False)
        rank = section.get("markov_rank", 0)
        sizes = cfg["vocab_size"], rank, cfg.get(SHORTLIST) or cfg["vocab_size"]
        self.markov_head = MarkovHead(*sizes) if rank else None

    def drafts(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Final states [N, A, B-1, H] of the masked positions."""
        texts, dtype = blocks.texts, self.fc.weight.dtype
        context = self.hidden_norm(self.fc(texts.taps.to(dtype)))
        positions = torch.arange(texts.taps.shape[1], device=embedding.device)[None]
        ids = torch.full(blocks.positions.shape, self.mask, device=embedding.device)
        ids[:, :, 0] = texts.tokens.gather(1, blocks.anchor)
        x, rope, rope_past = (
            F.embedding(ids.flatten(1), embedding).to(dtype),
            self.rope(blocks.positions.flatten(1)),
            self.rope(positions),
        )
        for layer in list[Any](self.layers):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            q = rotate(attn.q_norm(_heads(attn.q_proj(h), attn.head_dim)), *rope)
            own, past = _keys_values(attn, h, rope), _keys_values(attn, context, rope_past)
            x = x + attn.o_proj(mix_blocks(q, own, past, blocks.anchor, self.window))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(*ids.shape, -1)[:, :, 1:].contiguous()  # views are slow to multiply on a CPU

    def logits(self, states: Tensor, before: Tensor, head: Tensor) -> Tensor:
        """[..., V] of states [..., H] whose tokens before are `before` [...], by the target's head [V, H]."""
        logits = states.to(head.dtype) @ head.T
        return logits if self.markov_head is None else logits + self.markov_head(before).to(logits.dtype)


def _heads(x: Tensor, size: int) -> Tensor:
    """[N, S, heads·D] -> [N, heads, S, D]."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def _keys_values(attn: Any, x: Tensor, rope: KeyValue) -> KeyValue:
    return rotate(attn.k_norm(_heads(attn.k_proj(x), attn.head_dim)), *rope), _heads(attn.v_proj(x), attn.head_dim)


def mix_blocks(q: Tensor, own: KeyValue, past: KeyValue, seen: Tensor, window: int = 0) -> Tensor:
    """Each of A blocks attends to its own B positions and to the first `seen` [N, A] context rows, of these only to
    those less than `window` positions away where that is not 0; [N, A·B, Hq·D].

    q [N, Hq, A·B, D]. One mask over context and all blocks would spend most of its time on positions that other blocks
    own.
    """
    (count, kv_heads, length, size), blocks = own[0].shape, seen.shape[1]
    shape = (count, kv_heads, -1, blocks, length // blocks, size)
    q = (q * size**-0.5).view(shape).transpose(2, 3)  # [N, Hkv, A, G, B, D]
    group, rows = q.shape[3], (count, kv_heads, blocks, -1)
    q = q.reshape(count, kv_heads, -1, size)
    k, v = (each.view(*rows, size) for each in own)
    places, first = torch.arange(past[0].shape[2], device=q.device), seen[:, None, :, None, None]
    hidden = places >= first
    if window:
        own_places = torch.arange(length // blocks, device=q.device).repeat(group)[:, None]
        hidden = hidden | (places <= first + own_places - window)
    scores = (q @ past[0].mT).view(*rows, len(places)).masked_fill(hidden, -torch.inf)
    weights = torch.softmax(torch.cat([scores, q.view(*rows, size) @ k.mT], -1), -1)
    left, right = weights.split([len(places), k.shape[-2]], -1)
    out = (left.flatten(2, 3) @ past[1]).view(*rows, size) + right @ v
    return out.view(count, kv_heads, blocks, group, -1, size).permute(0, 2, 4, 1, 3, 5).reshape(count, length, -1)


class Attention(nn.Module):
    """EAGLE-3's: over inputs of twice the width, with no norm of heads."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        hidden, self.size = cfg["hidden_size"], cfg["head_dim"]
        queries, keys = (cfg[f"num_{name}_heads"] * self.size for name in ("attention", "key_value"))
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * hidden, width, bias=False) for width in (queries, keys, keys)
        )
        self.o_proj = nn.Linear(queries, hidden, bias=False)

    def keys_values(self, x: Tensor, rope: KeyValue) -> KeyValue:
        """Rotated keys and plain values of x [N, S, 2H]."""
        return rotate(_heads(self.k_proj(x), self.size), *rope), _heads(self.v_proj(x), self.size)

    def forward(self, x: Tensor, rope: KeyValue, past: KeyValue, seen: Tensor, own: list[KeyValue]) -> Tensor:
        """[N, A, H] of x [N, A, 2H]: each row sees its part of `past` and its own chain.

        past [N, Hkv, T, D] and seen [N, A, T]; own: keys and values [N, Hkv, A, D] of every step of the chains.
        """
        q = rotate(_heads(self.q_proj(x), self.size), *rope) * self.size**-0.5
        q = q.view(len(q), past[0].shape[1], -1, *q.shape[2:])  # [N, Hkv, G, A, D]
        scores = [(q @ past[0].unsqueeze(2).mT).masked_fill(~seen[:, None, None], -torch.inf)]
        scores += [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.softmax(torch.cat(scores, -1).float(), -1).to(q.dtype)
        out = weights[..., : past[0].shape[2]] @ past[1].unsqueeze(2)
        for step, (_, v) in enumerate(own, past[0].shape[2]):
            out = out + weights[..., step, None] * v.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class MidLayer(nn.Module):
    """EAGLE-3's one layer: norms of both halves of its input, attention, SwiGLU."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        hidden, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, eps=eps) for _ in range(3)
        )
        self.self_attn = Attention(cfg)
        self.mlp = Qwen3MLP(Qwen3Config(hidden_size=hidden, intermediate_size=cfg["intermediate_size"]))

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The attention's input [N, S, 2H]."""
        return torch.cat([self.input_layernorm(embeddings.to(features.dtype)), self.hidden_norm(features)], -1)


class Eagle3(Rotary):
    """One layer over [embedding of a token; feature of the one before], its feature fed back.

    The feature of position p is the projection of the target's tapped states there, or, where the target has not been,
    the layer's own output. Row p joins it with the embedding of the token at p + 1 and names the token at p + 2.
    Embedding and head are the target's.
    """

    block = 16  # with which it is measured

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        hidden, taps = cfg["hidden_size"], cfg["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.midlayer = MidLayer(cfg)
        self.fc = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])

    def drafts(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Normed features [N, A, B-1, H], each step fed with that of the one before it and the true token.

        An anchor's first step sees the features of positions before it, its later steps also its own chain.
        """
        texts, layer, rows, own = blocks.texts, self.midlayer, blocks.anchor - 1, list[KeyValue]()
        features = self.fc(texts.taps.to(self.fc.weight.dtype))
        places = torch.arange(features.shape[1], device=embedding.device)
        joined = layer.join(F.embedding(texts.tokens.roll(-1, 1), embedding), features)
        past = layer.self_attn.keys_values(joined, self.rope(places[None]))
        x = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))
        seen, found = places <= rows[..., None], []
        for step in range(blocks.before.shape[-1]):
            rope = self.rope(rows + step)
            joined = layer.join(F.embedding(blocks.before[..., step], embedding), x)
            if step:  # the first step's are in `past`
                own.append(layer.self_attn.keys_values(joined, rope))
            x = x + layer.self_attn(joined, rope, past, seen, own)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            found.append(x)
        return self.norm(torch.stack(found, 2))

    def logits(self, states: Tensor, before: Tensor, head: Tensor) -> Tensor:
        """[..., V] of states [..., H], by the target's head [V, H]."""
        return states.to(head.dtype) @ head.T


Drafter = DFlash | Eagle3


def make(cfg: Config) -> Drafter:
    return Eagle3(cfg) if "eagle_config" in cfg else DFlash(cfg)


def load_drafter(folder: Path) -> Drafter:
    """A frozen drafter in float32 from its folder."""
    model = make(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    weights.pop(TO_TARGET, None)  # the tokens it drafts from, which no layer depends on
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.requires_grad_(False).eval()
