"""A target as transformers computes it when it is rotated and rounded as int8 engines are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numerics import Truth
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ddtree_trt.build.graph.lowering_int8 import LARGEST, PARTS, quantize_channels
from ddtree_trt.build.graph.rotation import rotation_matrix, walsh


def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Of [1, heads, T, D] with a cache of bfloat16, where all positions are of one unit."""
    q, k, v = (x.bfloat16().float() for x in (query * scaling, key, value))
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = q @ k.mT + mask
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return (shares.bfloat16().float() @ v / shares.sum(-1, keepdim=True)).transpose(1, 2).contiguous(), None


AttentionInterface.register("bfloat16", attention)
AttentionMaskInterface.register("bfloat16", eager_mask)


class RoundedTruth(Truth):
    """transformers, with the stream rotated by a matrix, the inputs and the weight of every projection rounded, and
    attention in bfloat16."""

    def __init__(self, directory: Path, tap_layers: Any) -> None:
        super().__init__(directory, tap_layers)
        self.model.config._attn_implementation = "bfloat16"
        network, config = self.model.model, self.model.config
        stream = torch.from_numpy(rotation_matrix(config.hidden_size))
        head = torch.from_numpy(rotation_matrix(config.head_dim))
        width, parts = config.intermediate_size, math.gcd(config.intermediate_size, PARTS)
        values = torch.block_diag(*[head] * config.num_key_value_heads)
        outputs = torch.block_diag(*[head] * config.num_attention_heads)
        inner = torch.from_numpy(walsh(np.eye(width, dtype=np.float32), parts) / np.float32(math.sqrt(parts)))
        with torch.no_grad():
            back, out = stream.T, torch.diag(network.norm.weight) @ stream
            self._set(self.model.lm_head, self.model.lm_head.weight @ stream, lambda x: self._round(x @ back @ out))
            network.norm.weight.fill_(1)
            network.embed_tokens.weight = torch.nn.Parameter(network.embed_tokens.weight @ stream)
            for layer in network.layers:
                attention, mlp = layer.self_attn, layer.mlp
                for module in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                    norm = layer.input_layernorm if module not in (mlp.gate_proj, mlp.up_proj) else None
                    norm = norm or layer.post_attention_layernorm
                    weight = module.weight @ torch.diag(norm.weight) @ stream
                    if module is attention.v_proj:
                        weight = values.T @ weight
                        if module.bias is not None:
                            module.bias.copy_(values.T @ module.bias)
                    self._set(module, weight, self._round, twice=module is attention.v_proj)
                self._set(attention.o_proj, stream.T @ attention.o_proj.weight @ outputs, self._round)
                self._set(mlp.down_proj, stream.T @ mlp.down_proj.weight @ inner, lambda x: self._round(x @ inner))
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight.fill_(1)

    @staticmethod
    def _set(module: Any, weight: torch.Tensor, prepare: Any, *, twice: bool = False) -> None:
        """`twice`: what rounding takes from the weight is rounded and added."""
        exact = np.ascontiguousarray(weight.detach().numpy().T)
        values, scale = quantize_channels(exact)
        rounded = values * scale
        if twice:
            values, scale = quantize_channels(exact - rounded)
            rounded += values * scale
        module.weight = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(rounded.T)))
        module.register_forward_pre_hook(lambda _, inputs: prepare(inputs[0]))

    @staticmethod
    def _round(x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        return torch.round(x / largest * LARGEST) * largest / LARGEST
