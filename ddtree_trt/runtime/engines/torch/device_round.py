"""A decoding round that stays on the device: draft, tree build, tree compile, verify and commit as one function.

It is what `decode.decode_round` does by stages, for one number of sequences and one number of tree tokens, on tensors
that stay where they are; on a GPU it is one CUDA graph. A round's end is the next one's beginning, so that rounds can
be put on the stream ahead of the host, which only reads what comes out of a ring in pinned memory (`flight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import RoundRequest, RoundResult
from ddtree_trt.runtime.engines.torch.attention import Place, load_operators
from ddtree_trt.runtime.engines.torch.drafters import BlockDrafter
from ddtree_trt.runtime.engines.torch.graphs import Graphs
from ddtree_trt.runtime.engines.torch.noise import gumbel
from ddtree_trt.runtime.engines.torch.round_ops import HostOps, KernelOps, RoundOps
from ddtree_trt.runtime.stats import ROUND_STAGES

if TYPE_CHECKING:
    from ddtree_trt.runtime.engines.torch.engine import TorchEngine

RING = 4  # rounds the ring holds; more than are ever in flight, or one would be overwritten before it was read


class DeviceRound:
    """DDTree rounds of `batch` slots of an engine, each tree of at most `tokens` − 1 nodes: greedy ones, or `sampled`
    ones, in which every slot has a temperature, 0 for greedy."""

    def __init__(
        self,
        engine: TorchEngine,
        drafter: BlockDrafter,
        batch: int,
        tokens: int,
        graphs: Graphs,
        *,
        sampled: bool = False,
    ) -> None:
        self.engine, self._drafter, self._sampled = engine, drafter, sampled
        self._graphs = graphs
        self._key: Hashable = (batch, tokens, sampled)
        if engine.device.type == "cuda":
            load_operators()  # also for precisions whose attention does without
        self._ops: RoundOps = KernelOps() if engine.device.type == "cuda" or engine.kernels else HostOps()
        self._top_k = min(tokens - 1, engine.target.dims.vocab_size)
        block = drafter.dims.block_size
        self.longest = min(tokens, block)  # nodes of the longest path
        self.rows = max(tokens, block)  # cache rows a round may write behind the committed ones

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=engine.device)

        # What a round starts from and leaves behind, [batch] each.
        self.slots, self.past, self.context = integers(batch), integers(batch), integers(batch)
        self.waiting, self.bonus_tokens = integers(batch), integers(batch)
        self.seeds, self.temperatures = integers(batch, dtype=torch.int64), integers(batch, dtype=torch.float32)
        self.rounds = integers(1, dtype=torch.int64)
        # What it works on.
        self._budgets = integers(batch)
        self._token_ids, self._parents, self.depths, self._positions = (integers(batch, tokens) for _ in range(4))
        self._mask, self._path = integers(batch, tokens, -(-tokens // 32)), integers(batch, tokens)
        self._counts, self._lengths, self._next, self._next_past = (integers(batch) for _ in range(4))
        drafted, taps = (batch, block - 1, self._top_k), drafter.waiting
        self._log_probs, self.candidates = integers(*drafted, dtype=torch.float32), integers(*drafted)
        self._choices = integers(batch, tokens)
        self._taps = integers(batch, tokens, taps.shape[2], dtype=taps.dtype)
        # Of each round and sequence: nodes with the root, path length, and the target's choices along the path.
        self._ring = integers(RING, batch, 2 + self.longest)
        self._host_ring = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._ring.is_cuda)
        works = (self._draft, self._build, self._compile, self._verify, self._commit)
        self._stages = dict(zip(ROUND_STAGES, works, strict=True))

    def start(self, requests: Sequence[RoundRequest]) -> None:
        """Take up these slots where the engine has them; the first round verifies behind their bonus tokens."""
        drafter, cache = self._drafter, self.engine.cache
        for tensor, values in (
            (self.slots, [r.slot for r in requests]),
            (self.past, [cache.lengths[r.slot] for r in requests]),
            (self.context, [drafter.cache.lengths[r.slot] for r in requests]),
            (self.waiting, [drafter.counts[r.slot] for r in requests]),
            (self.bonus_tokens, [r.bonus_token for r in requests]),
            (self._budgets, [r.budget for r in requests]),
            (self.seeds, [r.seed for r in requests]),
            (self.temperatures, [r.temperature for r in requests]),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        self.rounds.zero_()

    def step(self) -> None:
        """Put one round on the stream. There must be room for it, and the engine's books learn nothing of it."""
        self._graphs.run(self._key, self._round)

    def read(self, number: int) -> list[RoundResult]:
        """What round `number` since the start brought. It must be done, and be one of the last RING."""
        rows = self._host_ring[number % RING].tolist()
        return [RoundResult(tokens[:length], count - 1) for count, length, *tokens in rows]

    def step_by_stages(self, after: Callable[[str], None]) -> None:
        """A round as five graphs instead of one, for measurements: `after` is told when each is on the stream."""
        for stage, work in self._stages.items():
            self._graphs.run((self._key, stage), work)
            after(stage)

    def _round(self) -> None:
        for work in self._stages.values():
            work()

    def _draft(self) -> None:
        drafted = self._drafter.run(self.slots, self.context, self.waiting, self.bonus_tokens, self._top_k)
        self._log_probs.copy_(drafted[0])
        self.candidates.copy_(drafted[1])
        self.context.add_(self.waiting)

    def _build(self) -> None:
        tree = (self._token_ids, self._parents, self.depths, self._positions, self._counts)
        self._ops.build_tree(self._log_probs, self.candidates, self.bonus_tokens, self._budgets, self.past, *tree)

    def _compile(self) -> None:
        self._ops.packed_mask(self._parents, self._mask)

    def _verify(self) -> None:
        target = self.engine.target
        place = Place(self.slots, self.past, self._mask)
        hidden, tapped = target.forward(self._token_ids, self._positions, place, MaskMode.TREE)
        assert tapped is not None, "a target built for a block drafter taps its states"
        self._taps.copy_(tapped)
        out = self.engine.logits[: self._token_ids.numel()]
        logits = target.logits(hidden.flatten(0, 1), out=out).unflatten(0, self._token_ids.shape)
        self._choices.copy_(self.choose(logits))
        self._ops.walk(
            self._parents, self._token_ids, self._choices, self._counts, self.past,
            self._path, self._lengths, self._next, self._next_past,
        )  # fmt: skip

    def _commit(self) -> None:
        """Keep the path's rows and states, tell the host, and leave everything as the next round wants it."""
        kept = self._path[:, : self.longest].contiguous()
        self.engine.cache.compact(self.slots, self.past, kept, self._lengths)
        path = kept.clamp(min=0).long()
        states = self._taps.gather(1, path[..., None].expand(-1, -1, self._taps.shape[2]))
        self._drafter.waiting[self.slots.long(), : self.longest] = states
        told = torch.cat((self._counts[:, None], self._lengths[:, None], self._choices.gather(1, path)), 1)
        self._ring.index_copy_(0, self.rounds % RING, told[None])
        self._host_ring.copy_(self._ring, non_blocking=True)
        self.rounds.add_(1)
        self.past.copy_(self._next_past)
        self.waiting.copy_(self._lengths)
        self.bonus_tokens.copy_(self._next)

    def choose(self, logits: Tensor) -> Tensor:
        """The target's token after each node, int32 [N, T], of logits [N, T, V], which are changed. One draw serves all
        nodes of a depth: at most one of them is on the path."""
        if self._sampled:
            depths = torch.arange(self._drafter.dims.block_size, device=logits.device)
            noise = gumbel(self.seeds, self.past[:, None] + 1 + depths, logits.shape[-1])
            drawn = noise.mul_(self.temperatures[:, None, None])
            logits += drawn.gather(1, self.depths.long()[..., None].expand_as(logits))
        return logits.argmax(-1).to(torch.int32)
