"""A decoding round that stays on the device: draft, tree build, tree compile, verify and commit as one function.

It is what `decode.decode_round` does, for one number of sequences and one tree budget, on tensors that stay where they
are; on a GPU it is one CUDA graph. A round's end is the next one's beginning, so the host launches rounds ahead and
only watches the tokens that come out of a ring in pinned memory. Rounds that it launched before it saw a stop are
forgotten: they wrote behind the rows that count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.plugins import MAX_DEVICE_BUDGET, MaskMode, reference
from ddtree_trt.runtime.stats import ROUND_STAGES
from ddtree_trt.runtime.torch import TorchEngine
from ddtree_trt.runtime.torch_attention import Place, load_operators
from ddtree_trt.runtime.torch_drafters import BlockDrafter
from ddtree_trt.runtime.torch_graphs import Graphs
from ddtree_trt.runtime.torch_noise import gumbel
from ddtree_trt.runtime.tree import build_tree

AHEAD = 2  # rounds in flight: the host reads one while the device does the next
RING = 4  # rounds the ring holds; more than are in flight, or one would be overwritten before it was read

Watch = Callable[[int, list[int]], bool]


class DeviceRound:
    """Greedy DDTree rounds, or sampled ones at a temperature, for `batch` slots of an engine."""

    def __init__(
        self,
        engine: TorchEngine,
        batch: int,
        budget: int,
        *,
        sampled: bool = False,
        forced: int | None = None,
        capture: bool = True,
    ) -> None:
        """`forced`: tokens every round commits, whatever the target says: for round times of random weights.

        Raises UsageError for a budget the device cannot build trees of, or an engine without a block drafter.
        """
        largest = min(MAX_DEVICE_BUDGET, engine.limits.max_tree_budget)
        if not isinstance(engine.drafter, BlockDrafter):
            raise UsageError("a round on the device needs a block drafter; this engine's is autoregressive")
        if not 1 <= budget <= largest:
            raise UsageError(f"the device builds trees of 1 to {largest} nodes, not of {budget}")
        self.engine, self._drafter, self._sampled, self._forced = engine, engine.drafter, sampled, forced
        self._graphs = Graphs(engine.device, capture=capture)
        if engine.device.type == "cuda":
            load_operators()  # also for precisions whose attention does without
        self._ops: RoundOps = KernelOps() if engine.device.type == "cuda" or engine.kernels else HostOps()
        tokens, block = 1 + budget, engine.drafter.dims.block_size
        self._top_k = min(budget, engine.target.dims.vocab_size)
        self._columns = min(tokens, block)  # nodes of the longest path

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=engine.device)

        # What a round starts from and leaves behind, [batch] each.
        self.slots, self.past, self.context = integers(batch), integers(batch), integers(batch)
        self.waiting, self.bonus_tokens = integers(batch), integers(batch)
        self.seeds, self.temperatures = integers(batch, dtype=torch.int64), integers(batch, dtype=torch.float32)
        self.rounds = integers(1, dtype=torch.int64)
        # What it works on.
        self._budgets = torch.full((batch,), budget, dtype=torch.int32, device=engine.device)
        self._token_ids, self._parents, self._depths, self._positions = (integers(batch, tokens) for _ in range(4))
        self._mask, self._path = integers(batch, tokens, -(-tokens // 32)), integers(batch, tokens)
        self._counts, self._lengths, self._next, self._next_past = (integers(batch) for _ in range(4))
        drafted, taps = (batch, block - 1, self._top_k), engine.drafter.waiting
        self._log_probs, self._candidates = integers(*drafted, dtype=torch.float32), integers(*drafted)
        self._choices = integers(batch, tokens)
        self._taps = integers(batch, tokens, taps.shape[2], dtype=taps.dtype)
        self._ring = integers(RING, batch, 1 + self._columns)
        self._host_ring = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._ring.is_cuda)
        works = (self._draft, self._build, self._compile, self._verify, self._commit)
        self._stages = dict(zip(ROUND_STAGES, works, strict=True))

    def start(
        self,
        slots: Sequence[int],
        bonus_tokens: Sequence[int],
        seeds: Sequence[int] = (),
        temperatures: Sequence[float] = (),
    ) -> None:
        """Take up these slots where the engine has them; the first round verifies behind their bonus tokens."""
        drafter, cache = self._drafter, self.engine.cache
        for slot in slots:
            if drafter.known(slot) != cache.lengths[slot]:
                raise EngineError(f"slot {slot} holds tokens the drafter was not told of")
        for tensor, values in (
            (self.slots, slots),
            (self.past, [cache.lengths[s] for s in slots]),
            (self.context, [drafter.cache.lengths[s] for s in slots]),
            (self.waiting, [drafter.counts[s] for s in slots]),
            (self.bonus_tokens, bonus_tokens),
            (self.seeds, seeds or [0] * len(slots)),
            (self.temperatures, temperatures or [0.0] * len(slots)),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        self.rounds.zero_()

    def step(self) -> None:
        """Put one round on the stream. There must be room for it, and the engine learns nothing of it: `run` sees to
        both."""
        self._graphs.run("round", self._round)

    def run(
        self,
        slots: Sequence[int],
        bonus_tokens: Sequence[int],
        watch: Watch,
        seeds: Sequence[int] = (),
        temperatures: Sequence[float] = (),
    ) -> None:
        """Rounds until `watch(n, tokens)`, told what sequence n emitted in each round, returns False for one of them,
        or a slot has no room for the rounds in flight.

        The engine then holds every token but the last that was told. Who keeps fewer truncates the slot.
        """
        self.start(slots, bonus_tokens, seeds, temperatures)
        past = [self.engine.cache.lengths[s] for s in slots]
        last = [0] * len(slots)  # what the latest round committed
        launched = seen = 0
        marks: deque[torch.cuda.Event | None] = deque()
        going = True
        while True:
            while going and len(marks) < AHEAD and self._has_room(past, 1 + len(marks)):
                self.step()
                marks.append(self._mark())
                launched += 1
            if not going or not marks:
                break
            _wait(marks.popleft())
            for n, (length, *tokens) in enumerate(self._host_ring[seen % RING].tolist()):
                past[n] += length
                last[n] = length
                going &= watch(n, tokens[:length])
            seen += 1
        if seen:
            self._hand_back(slots, past, last, forgotten=launched > seen)

    def _has_room(self, past: Sequence[int], rounds: int) -> bool:
        """Whether so many more rounds fit, the longest there are."""
        return max(past) + rounds * self._columns <= self.engine.limits.max_seq_len

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what is on the stream now; on a CPU nothing is ever under way."""
        if not self._ring.is_cuda:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _hand_back(self, slots: Sequence[int], past: Sequence[int], last: Sequence[int], *, forgotten: bool) -> None:
        """Tell the engine what its slots hold. A forgotten round has already taken in the states of the last one that
        counts, and overwritten them where they waited."""
        drafter = self._drafter
        for slot, length, states in zip(slots, past, last, strict=True):
            waiting = 0 if forgotten else states
            self.engine.cache.lengths[slot] = length
            drafter.cache.lengths[slot], drafter.counts[slot] = length - waiting, waiting

    def step_by_stages(self, after: Callable[[str], None]) -> None:
        """A round as five graphs instead of one, for measurements: `after` is told when each is on the stream."""
        for stage, work in self._stages.items():
            self._graphs.run(stage, work)
            after(stage)

    def _round(self) -> None:
        for work in self._stages.values():
            work()

    def _draft(self) -> None:
        drafted = self._drafter.run(self.slots, self.context, self.waiting, self.bonus_tokens, self._top_k)
        self._log_probs.copy_(drafted[0])
        self._candidates.copy_(drafted[1])
        self.context.add_(self.waiting)

    def _build(self) -> None:
        tree = (self._token_ids, self._parents, self._depths, self._positions, self._counts)
        self._ops.build_tree(self._log_probs, self._candidates, self.bonus_tokens, self._budgets, self.past, *tree)

    def _compile(self) -> None:
        self._ops.packed_mask(self._parents, self._mask)

    def _verify(self) -> None:
        target = self.engine.target
        place = Place(self.slots, self.past, self._mask)
        hidden, tapped = target.forward(self._token_ids, self._positions, place, MaskMode.TREE)
        assert tapped is not None, "a target built for a block drafter taps its states"
        self._taps.copy_(tapped)
        logits = target.logits(hidden.flatten(0, 1)).unflatten(0, self._token_ids.shape)
        self._choices.copy_(self._choose(logits))
        self._ops.walk(
            self._parents, self._token_ids, self._choices, self._counts, self.past,
            self._path, self._lengths, self._next, self._next_past,
        )  # fmt: skip

    def _commit(self) -> None:
        """Keep the path's rows and states, tell the host, and leave everything as the next round wants it."""
        kept = self._path[:, : self._columns].contiguous()
        self.engine.cache.compact(self.slots, self.past, kept, self._lengths)
        path = kept.clamp(min=0).long()
        states = self._taps.gather(1, path[..., None].expand(-1, -1, self._taps.shape[2]))
        self._drafter.waiting[self.slots.long(), : self._columns] = states
        emitted = torch.cat((self._lengths[:, None], self._choices.gather(1, path)), 1)
        self._ring.index_copy_(0, self.rounds % RING, emitted[None])
        self._host_ring.copy_(self._ring, non_blocking=True)
        self.rounds.add_(1)
        self.past.copy_(self._next_past)
        self.waiting.copy_(self._lengths)
        self.bonus_tokens.copy_(self._next)

    def _choose(self, logits: Tensor) -> Tensor:
        """The target's token after each node, int32 [N, T], of logits [N, T, V]. One draw serves all nodes of a depth:
        at most one of them is on the path."""
        if self._sampled:
            depths = torch.arange(self._drafter.dims.block_size, device=logits.device)
            noise = gumbel(self.seeds, self.past[:, None] + 1 + depths, logits.shape[-1])
            drawn = noise.mul_(self.temperatures[:, None, None])
            logits = logits + drawn.gather(1, self._depths.long()[..., None].expand_as(logits))
        choices = logits.argmax(-1).to(torch.int32)
        if self._forced is None:
            return choices
        # The most probable token of each depth is a chain of the tree: follow it, then leave it.
        best = self._candidates[:, :, 0]
        spine = torch.cat((best, best[:, -1:]), 1).gather(1, self._depths.long())
        return torch.where(self._depths < self._forced - 1, spine, (spine + 1) % logits.shape[-1]).contiguous()


class RoundOps(Protocol):
    """The operators of `cpp_plugins/torch/ops.cpp` that a round needs, with their arguments."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        """Trees of log_probs [N, L, K] into the int32 tensors [N, T], and their sizes, root included, into counts."""

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        """Ancestor-or-self bits of parents [N, T] into mask [N, T, W]."""

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        """The accepted paths into path [N, T], padded with −1, and what follows from them into tensors [N]."""


class KernelOps:
    """`torch.ops.ddtree`."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        torch.ops.ddtree.build_tree(
            log_probs, candidates, root_tokens, budgets, past, token_ids, parents, depths, positions, None, counts
        )

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        torch.ops.ddtree.packed_mask(parents, mask)

    def walk(self, *tensors: Tensor) -> None:
        torch.ops.ddtree.walk(*tensors)


class HostOps:
    """The same in NumPy and the host's C++, for a CPU."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        for n, budget in enumerate(budgets.tolist()):
            tree = build_tree(log_probs[n].numpy(), candidates[n].numpy(), budget)
            size = 1 + len(tree)
            token_ids[n], parents[n], depths[n] = root_tokens[n], -1, 0
            token_ids[n, 1:size] = torch.from_numpy(tree.token_ids)
            parents[n, :size] = torch.from_numpy(tree.parents)
            depths[n, 1:size] = torch.from_numpy(tree.depths)
            counts[n] = size
        positions.copy_(past[:, None] + depths)

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        for n, row in enumerate(parents.numpy()):
            mask[n] = torch.from_numpy(reference.packed_mask(row, mask.shape[2]))

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        for n, count in enumerate(counts.tolist()):
            nodes = reference.walk(parents[n].numpy(), token_ids[n].numpy(), choices[n].numpy(), count)
            path[n] = -1
            path[n, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
            lengths[n], next_tokens[n] = len(nodes), choices[n, nodes[-1]]
        next_past.copy_(past + lengths)


def _wait(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        mark.synchronize()
