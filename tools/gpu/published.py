"""Rounds of the published DDTree code on the same random weights, on the same device: for `bench.py`."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree_trt.artifact.weight_layout import stored_weights
from ddtree_trt.bench.pairs.random_pair import PairShape, hugging_face_configs
from ddtree_trt.bench.reference import adapted_libraries, forced_acceptance, import_published
from ddtree_trt.drafters.registry import checkpoint_shapes


class Published:
    """Both networks under the published loops, with PyTorch SDPA attention."""

    def __init__(self, checkout: Path, shape: PairShape, weights: dict[str, Tensor], device: torch.device) -> None:
        import transformers

        self._published = import_published(checkout)
        self._device = device
        dtype = weights["target.embedding"].dtype
        target, drafter = hugging_face_configs(shape)
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        with torch.device(device):
            config = transformers.Qwen3Config.from_dict(target)
            self._target = transformers.Qwen3ForCausalLM._from_config(config, **options).eval()
            config = transformers.Qwen3Config.from_dict(drafter)
            self._drafter = self._published.ddtree.DFlashDraftModel._from_config(config, **options).eval()
        _copy(self._target, self._drafter, shape, weights)
        self._mask_token_id = shape.drafter.mask_token_id
        self._block = shape.block_size
        self._published.ddtree.maybe_enable_cpp_compact(True)

    def time(self, past: int, budget: int, forced: int, rounds: int) -> dict[str, Any]:
        """Milliseconds per round after a prompt of `past` tokens; budget 0 is autoregressive."""
        rng = np.random.default_rng(0)
        prompt = torch.tensor(rng.integers(0, self._mask_token_id, (1, past)), device=self._device)
        options: dict[str, Any] = {
            "model": self._drafter,
            "target": self._target,
            "input_ids": prompt,
            "mask_token_id": self._mask_token_id,
            "max_new_tokens": (rounds + 4) * (forced if budget else 1),
            "block_size": self._block if budget else 1,
            "stop_token_ids": None,
            "temperature": 0.0,
        }
        with adapted_libraries():
            if budget:
                with forced_acceptance(self._published, forced, frozenset()):
                    result = self._published.ddtree.ddtree_generate(**options, tree_budget=budget)
            else:
                result = self._published.dflash.dflash_generate(**options)
        times_ms = [1e3 * (b - a) for a, b in pairwise(result.round_timestamps)][2:]
        return {
            "budget": budget,
            "round_ms": statistics.median(times_ms),
            "rounds": len(times_ms),
            "tokens_per_round": statistics.mean(result.acceptance_lengths),
        }


def _copy(target: Any, drafter: Any, shape: PairShape, weights: dict[str, Tensor]) -> None:
    """Copy our joined weights into their modules, so that both draft trees of the same shapes."""
    states = {"target": target.state_dict(), "drafter": drafter.state_dict()}
    shapes = {
        name: checkpoint_shapes(dims, tied=shape.tied)
        for name, dims in (("target", shape.target), ("drafter", shape.drafter))
    }
    for weight in stored_weights(shape.target, shape.drafter, target_tied=shape.tied, drafter_tied=shape.tied):
        rows = weights[weight.name].reshape(-1, weight.shape[-1]) if len(weight.shape) > 1 else weights[weight.name]
        start = 0
        for source in weight.sources:
            size = shapes[weight.network][source][0]
            states[weight.network][source].copy_(rows[start : start + size])
            start += size
