"""Limits an engine is built for: lengths, slots and budgets, with their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddtree_trt.models.decoder import POSITIONS
from ddtree_trt.reading import Between

SLOTS = Between(1, 1024)
BUDGETS = Between(1, 4096)
CHUNK = Between(1, 1 << 16)


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
