"""The DFlash drafter stated plainly in PyTorch, and what a block drafter must never ask for."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numerics import Array, Truth
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims


class Layers:
    """The parts of a decoder's layer in float32, over one sequence, with the tensors of a checkpoint."""

    def __init__(self, dims: Any, weights: Mapping[str, Any], directory: Any = None) -> None:
        """`directory` has the config.json of a drafter whose rotary embedding is scaled."""
        self.dims = dims
        self.directory = directory
        self.w = {name: torch.as_tensor(values).float() for name, values in weights.items()}

    def mlp(self, layer: str, h: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T

    def attend(self, layer: str, rows: Tensor, hidden: Tensor) -> Tensor:
        """Attention of the last Q rows over all rows, at positions from 0 on, but those that are `hidden` bool [Q, K]:
        [Q, H]."""
        d, positions, first = self.dims, torch.arange(len(rows)), len(rows) - len(hidden)
        query = self.turn(self.heads(layer, "q", rows[first:]), positions[first:])
        key, value = self.turn(self.heads(layer, "k", rows), positions), self.heads(layer, "v", rows)
        key, value = (t.repeat_interleave(d.num_heads // d.num_kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(d.head_dim)
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), value)
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
            speed, magnitude = ROPE_INIT_FUNCTIONS[self.dims.rope_scaling.rope_type](
                AutoConfig.from_pretrained(self.directory), "cpu"
            )
        angle = positions[:, None, None] * speed.double()
        turn = torch.polar(torch.full_like(angle, magnitude), angle)
        turned = torch.complex(*x.double().split(half, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).float()


class DFlash(Layers):
    """DFlash in float32, all of it computed anew from the tapped states of every committed token.

    The states pass through `fc` and a norm, and stand as context in every layer: keys and values come from context and
    block, queries from the block [bonus, MASK, …]. A layer may have a window of W positions, in which a query at p sees
    keys at k with |p − k| < W, and may be causal, in which it sees keys with k ≤ p. Embedding and head are the target's
    unless the checkpoint has its own, whose ids may be draft ids that `d2t` maps.
    """

    def __init__(self, directory: Path, dims: DFlashDims, truth: Truth) -> None:
        super().__init__(dims, load_file(directory / "model.safetensors"), directory)
        self.embed, self.head = (m.weight.detach() for m in (truth.model.model.embed_tokens, truth.model.lm_head))
        if dims.own_embedding:
            self.embed = self.w["embed_tokens.weight"]
        if dims.own_head:
            self.head = self.w["lm_head.weight"]

    def __call__(self, states: Array, bonus: int) -> Array:
        """Log-probabilities [L, V] from the states [C, M·H] of all C committed tokens, without what a head for pairs
        adds; −inf where a token has no draft id."""
        d = self.dims
        drafted = functional.log_softmax(self.logits(self.hidden(states, bonus)), dim=-1)
        if d.draft_vocab_size is None:
            return drafted.numpy()
        whole = torch.full((len(drafted), d.vocab_size), -torch.inf)
        for draft_id, offset in enumerate(self.w["d2t"].tolist()):
            whole[:, draft_id + int(offset)] = drafted[:, draft_id]
        return whole.numpy()

    def hidden(self, states: Array, bonus: int) -> Tensor:
        """The normed hidden states [L, H] of the rows that draft."""
        d, w = self.dims, self.w
        context = self.norm(torch.tensor(states) @ w["fc.weight"].T, "hidden_norm")
        x = d.embedding_scale * self.embed[[bonus] + [d.mask_token_id] * (d.block_size - 1)]
        for i in range(d.num_layers):
            layer = f"layers.{i}"
            h = self.norm(x, f"{layer}.input_layernorm")
            x = x + self.around(f"{layer}.attention_conv", h, functools.partial(self.attention, i, context))
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.around(f"{layer}.mlp_conv", h, functools.partial(self.mlp, layer))
        return self.norm(x, "norm")[0 if d.anchor_first else 1 :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V'] of hidden states [..., H], times their multiplier, under a soft cap where there is one."""
        logits = hidden @ self.head.T * self.dims.logit_scale
        return self.dims.logit_cap * torch.tanh(logits / self.dims.logit_cap) if self.dims.logit_cap else logits

    def scores(self, hidden: Tensor, position: int, before: int) -> Tensor:
        """Scores [V'] of every token of the head at a position after the token `before`, from the block's hidden states
        [L, H]: the logits, and what a head for pairs adds where the checkpoint has one."""
        w, h = self.w, hidden[position]
        logits = self.logits(h)
        if "markov_head.markov_w1.weight" in w:
            e = w["markov_head.markov_w1.weight"][before]
            if "markov_head.gate_proj.weight" in w:
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
                e = torch.sigmoid(gate) * e
            return logits + w["markov_head.markov_w2.weight"] @ e
        if "candidate_selector.predecessor_codebook" in w:
            projected = w["candidate_selector.hidden_projection.weight"] @ h
            after = w["candidate_selector.successor_codebook"]
            return logits + after @ (w["candidate_selector.predecessor_codebook"][before] * projected)
        return logits

    def around(self, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer between the two sides of a convolution over the block's rows, where the checkpoint has one. Both
        kernels come from the sublayer's input; a row before the block is zero."""
        if f"{name}.base_kernel" not in self.w:
            return sublayer(x)
        base = self.w[f"{name}.base_kernel"]
        sides, taps, width = base.shape
        moving = (x @ self.w[f"{name}.kernel_projection.weight"].T).reshape(len(x), sides, taps, -1)
        kernels = base + moving.repeat_interleave(width // moving.shape[-1], -1)  # [block, side, tap, H]

        def convolve(side: int, rows: Tensor) -> Tensor:
            out = torch.zeros_like(rows)
            for i in range(len(rows)):
                for tap in range(min(taps, i + 1)):
                    out[i] += kernels[i, side, tap] * rows[i - tap]
            return out

        return convolve(1, sublayer(convolve(0, x)))

    def attention(self, index: int, context: Tensor, block: Tensor) -> Tensor:
        d = self.dims
        ahead = torch.arange(len(context) + len(block)) - torch.arange(len(context), len(context) + len(block))[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if d.causal and d.causal[index]:
            hidden |= ahead > 0
        if d.windows and d.windows[index]:
            hidden |= ahead.abs() >= d.windows[index]
        return self.attend(f"layers.{index}", torch.cat([context, block]), hidden)


# EAGLE-3


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
