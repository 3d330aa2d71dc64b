"""What a pair of networks and an engine measure, and the numbers each of that may be.

The bounds hold for checkpoints and manifests alike: `build` and `artifact` both read by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddtree_trt.reading import Between

# Far above any use, far below what hangs or overflows.
VOCABULARY, WIDTH, LAYERS, HEADS, HEAD_DIM = (Between(1, n) for n in (1 << 24, 1 << 20, 1000, 4096, 4096))
EPSILON, ROPE_BASE = Between(1e-30, 0.1), Between(1, 1e15)  # float32 holds both ends
POSITIONS = Between(2, 1 << 27)  # one for a prompt, one for what follows it
BLOCK, TOKEN, LAYER = Between(2, 4096), Between(0, (1 << 24) - 1), Between(0, 999)
SLOTS, BUDGETS, CHUNK = Between(1, 1024), Between(1, 4096), Between(1, 1 << 16)

Token = Annotated[int, TOKEN]


@dataclass(frozen=True)
class TransformerDims:
    """Shape of a decoder-only transformer of the Qwen3 family."""

    vocab_size: Annotated[int, VOCABULARY]  # V
    hidden_size: Annotated[int, WIDTH]  # H
    num_layers: Annotated[int, LAYERS]
    num_heads: Annotated[int, HEADS]  # Hq
    num_kv_heads: Annotated[int, HEADS]  # Hkv
    head_dim: Annotated[int, HEAD_DIM]  # D
    intermediate_size: Annotated[int, WIDTH]
    rms_norm_eps: Annotated[float, EPSILON]
    rope_theta: Annotated[float, ROPE_BASE]
    max_positions: Annotated[int, POSITIONS]  # positions the rotary embedding was made for


@dataclass(frozen=True)
class DrafterDims(TransformerDims):
    """A DFlash drafter: a block of `block_size` tokens is denoised in one pass over tapped target states."""

    block_size: Annotated[int, BLOCK]  # the bonus token and L = block_size − 1 masks
    mask_token_id: Annotated[int, TOKEN]
    tap_layers: tuple[Annotated[int, LAYER], ...]  # target layers whose output is tapped, M of them
    num_target_layers: Annotated[int, LAYERS]


@dataclass(frozen=True)
class Limits:
    """What an engine was built for. These are the only defaults; the command line reads them from here."""

    max_seq_len: Annotated[int, POSITIONS] = 2048  # prompt and output tokens of one slot
    max_batch: Annotated[int, SLOTS] = 8  # slots
    max_tree_budget: Annotated[int, BUDGETS] = 256  # B: tree nodes beside the root
    prefill_chunk: Annotated[int, CHUNK] = 256  # prompt tokens per target pass

    @property
    def max_tokens_per_pass(self) -> int:
        """Most tokens of one slot in one target pass."""
        return max(1 + self.max_tree_budget, self.prefill_chunk)

    @property
    def cache_rows(self) -> int:
        """S: rows of a slot's cache. One whole pass may be written past the last committed token."""
        return self.max_seq_len + self.max_tokens_per_pass
