"""A decoding round that stays on the device: draft, tree build, tree compile, verify and commit as one function.

It computes what `decoding.loop.decode_round` computes by stages, for a fixed number of sequences and of tree tokens, on
tensors at fixed addresses; on a GPU it is one CUDA graph. The state after a round is the input of the next one, so that
rounds can be launched ahead of the host, which only reads results from a ring in pinned memory (`rounds.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree_trt import _native
from ddtree_trt.runtime.engines.base import RoundRequest, RoundResult
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.passes import mask_words, write_mask
from ddtree_trt.runtime.engines.torch.attention import DeviceCache, Place, load_operators
from ddtree_trt.runtime.engines.torch.target import TargetPass
from ddtree_trt.runtime.stats import ROUND_STAGES
from ddtree_trt.runtime.tree import build_tree

_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_TOKEN_BITS = 24  # of the counter; the other bits are the position
_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def noise_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """64 bits as int64 [N, P, V] for seeds int64 [N] and positions int [N, P] of the tokens to be drawn."""
    token = torch.arange(vocab_size, device=seeds.device)
    counter = (positions.long() << _TOKEN_BITS)[..., None] + token
    x = seeds[:, None, None] + (counter + 1) * _signed(_GAMMA)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST_FACTOR)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND_FACTOR)
    return x ^ _shifted(x, 31)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float32 [N, P, V], all finite: between −2.9 and 43.7."""
    # Uniform in (0, 1), exact near 0, where the noise is largest.
    uniform = (_shifted(noise_bits(seeds, positions, vocab_size), 1) | 1).float() * 2.0**-63
    return -torch.log(-torch.log1p(-uniform.clamp_(max=_BELOW_ONE)))


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit number; products wrap around."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def round_ops(device: torch.device, kernels: bool) -> HostOps:
    """The kernels on a GPU, or on a CPU where they are emulated (`kernels`); else the host's operators. Raises
    MissingDependency as `load_operators` does."""
    if device.type == "cuda":
        load_operators()  # attention without kernels has not loaded them
    return KernelOps() if device.type == "cuda" or kernels else HostOps()


class HostOps:
    """The operators of `cpp_plugins/torch/ops.cpp` that a round needs, with their arguments: the host's C++ functions,
    for tensors of a CPU."""

    def build_tree(
        self, log_probs: Tensor, candidates: Tensor, root_tokens: Tensor, budgets: Tensor, past: Tensor,
        token_ids: Tensor, parents: Tensor, depths: Tensor, positions: Tensor, counts: Tensor,
        log_weights: Tensor | None = None, outlook_depths: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Trees of log_probs [N, L, K] into the int32 tensors [N, T], and their sizes, root included, into counts. Of
        the first O nodes of a larger tree, root not counted, the log-weights float32 and depths int32 [N, O]; −inf and
        0 where there is none, as with a budget of 0."""
        outlook = 0 if log_weights is None else log_weights.shape[1]
        for n, budget in enumerate(budgets.tolist()):
            grown = build_tree(log_probs[n].numpy(), candidates[n].numpy(), max(budget, outlook) if budget else 0)
            if log_weights is not None and outlook_depths is not None:
                seen = grown.cut(outlook)
                log_weights[n], outlook_depths[n] = -torch.inf, 0
                log_weights[n, : len(seen)] = torch.from_numpy(seen.log_weights)
                outlook_depths[n, : len(seen)] = torch.from_numpy(seen.depths)
            tree = grown.cut(budget)
            size = 1 + len(tree)
            token_ids[n], parents[n], depths[n] = root_tokens[n], -1, 0
            token_ids[n, 1:size] = torch.from_numpy(tree.token_ids)
            parents[n, :size] = torch.from_numpy(tree.parents)
            depths[n, 1:size] = torch.from_numpy(tree.depths)
            counts[n] = size
        positions.copy_(past[:, None] + depths)

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        """Ancestor-or-self bits of parents [N, T] into mask [N, T, W]."""
        mask.zero_()
        for row, bits in zip(parents.numpy(), mask.numpy(), strict=True):
            size = 1 + np.count_nonzero(row[1:] >= 0)  # padding has the parent −1, as the root
            write_mask(bits.view(np.uint32), row[:size])

    def walk(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, past: Tensor,
        path: Tensor, lengths: Tensor, next_tokens: Tensor, next_past: Tensor,
    ) -> None:  # fmt: skip
        """The accepted paths into path [N, T], padded with −1; their lengths, next bonus tokens and the next committed
        lengths into tensors [N]."""
        path.fill_(-1)
        for n, size in enumerate(counts.tolist()):
            tree, chosen = parents[n, :size].numpy(), choices[n, :size].numpy()
            nodes = _native.walk(tree, token_ids[n, 1:size].numpy(), chosen)
            path[n, : len(nodes)] = torch.from_numpy(nodes)
            lengths[n], next_tokens[n] = len(nodes), int(chosen[nodes[-1]])
        next_past.copy_(past + lengths)


class KernelOps(HostOps):
    """`torch.ops.ddtree`."""

    def build_tree(self, *tensors: Tensor | None) -> None:
        torch.ops.ddtree.build_tree(*tensors)

    def packed_mask(self, parents: Tensor, mask: Tensor) -> None:
        torch.ops.ddtree.packed_mask(parents, mask)

    def walk(self, *tensors: Tensor) -> None:
        torch.ops.ddtree.walk(*tensors)


RING = 4  # rounds in the ring: more than are launched ahead, so that none is overwritten before it is read


class BlockOnDevice(Drafter):
    """A drafter of blocks that takes part in such rounds. Tapped states wait for its next pass in a buffer."""

    dims: Any  # has `block_size`, `draft_length` and `head_size`
    cache: DeviceCache
    waiting: Tensor  # [slots, 1 + L, M·H]: states that it has not processed
    counts: list[int]  # of them, of each slot

    @abstractmethod
    def run(
        self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int, reach: int
    ) -> tuple[Tensor, ...]:
        """Process the waiting states and draft behind them, for int32 [N] each: of the first `reach` positions, P,
        log-probabilities [N, P, K], falling, and the candidates int32 [N, P, K]."""

    @abstractmethod
    def hold(self, slots: Tensor, states: Tensor) -> None:
        """Put tapped states [N, m, M·H], m at most 1 + L, into the buffers of slots int32 [N]; `counts` stays as it
        is."""

    @abstractmethod
    def advance(self, slot: int, committed: int, *, waiting: int) -> None:
        """Count a round that ran on the device: the states of its last `waiting` tokens are in the buffer, all earlier
        ones in the cache."""


class DeviceRound:
    """DDTree rounds of `batch` slots of an engine, N, each tree of at most `tokens` − 1 nodes, T with the root: greedy
    ones, or `sampled` ones, in which every slot has a temperature, 0 for greedy."""

    def __init__(self, target: TargetPass, drafter: BlockOnDevice, batch: int, tokens: int, sampled: bool) -> None:
        self._target = target
        self._drafter = drafter
        self._key = ("round", batch, tokens, sampled)
        self._sampled = sampled
        self._ops = round_ops(target.device, target.kernels)
        length, block = drafter.dims.draft_length, drafter.dims.block_size
        width, states = drafter.waiting.shape[2], drafter.waiting.dtype
        self._top_k = min(tokens - 1, drafter.dims.head_size)
        self.longest = min(tokens, 1 + length)  # nodes of the longest path
        self.rows = max(tokens, block, 1 + length)  # cache rows a round may write behind the committed ones

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=target.device)

        # The state that a round reads, and updates for the next one, [N] each.
        self._slots = zeros(batch)
        self._past = zeros(batch)  # committed rows of the target's cache
        self._context = zeros(batch)  # rows of the drafter's cache
        self._waiting = zeros(batch)  # tapped states that the drafter has not processed
        self._bonus_tokens = zeros(batch)
        self._rounds = zeros(1, dtype=torch.int64)  # rounds since the start
        # The requests' constants, [N] each.
        self._budgets = zeros(batch)
        self._seeds = zeros(batch, dtype=torch.int64)
        self._temperatures = zeros(batch, dtype=torch.float32)
        # The draft, [N, P, K]: of the positions that the tree can reach.
        self._log_probs = zeros(batch, self.longest - 1, self._top_k, dtype=torch.float32)
        self.candidates = zeros(batch, self.longest - 1, self._top_k)
        # The trees, [N, T], and their sizes [N], roots included.
        self._token_ids = zeros(batch, tokens)
        self._parents = zeros(batch, tokens)
        self.depths = zeros(batch, tokens)
        self._positions = zeros(batch, tokens)
        self._counts = zeros(batch)
        self._mask = zeros(batch, tokens, mask_words(tokens))  # [N, T, W]
        # The results of the verification, [N, T] and [N, T, M·H], and of the walk.
        self._choices = zeros(batch, tokens)
        self._taps = zeros(batch, tokens, width, dtype=states)
        self._path = zeros(batch, tokens)  # [N, T], padded with −1
        self._lengths = zeros(batch)
        self._next_bonus_tokens = zeros(batch)
        self._next_past = zeros(batch)
        # For each round and sequence: nodes with the root, path length, and the target's choices along the path.
        self._ring = zeros(RING, batch, 2 + self.longest)
        self._host_ring = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._ring.is_cuda)

    def start(self, requests: Sequence[RoundRequest]) -> None:
        """Set the state to the host's counts and the requests of these slots; the first round begins at their bonus
        tokens."""
        drafter, cache = self._drafter, self._target.cache
        for tensor, values in (
            (self._slots, [r.slot for r in requests]),
            (self._past, [cache.lengths[r.slot] for r in requests]),
            (self._context, [drafter.cache.lengths[r.slot] for r in requests]),
            (self._waiting, [drafter.counts[r.slot] for r in requests]),
            (self._bonus_tokens, [r.bonus_token for r in requests]),
            (self._budgets, [r.budget for r in requests]),
            (self._seeds, [r.seed for r in requests]),
            (self._temperatures, [r.temperature for r in requests]),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        self._rounds.zero_()

    def step(self) -> None:
        """Put one round on the stream. The slots must have room for it; the host's counts do not change."""
        self._target.graphs.run(self._key, self._round)

    def read(self, number: int) -> list[RoundResult]:
        """The results of round `number` since the start, which must be done and one of the last RING."""
        rows = self._host_ring[number % RING].tolist()
        return [RoundResult(tokens[:length], count - 1) for count, length, *tokens in rows]

    def step_by_stages(self, after: Callable[[str], None]) -> None:
        """A round as five graphs instead of one, for measurements: `after` is called with each stage's name when that
        stage is on the stream."""
        for stage, work in self._stages():
            self._target.graphs.run((*self._key, stage), work)
            after(stage)

    def _round(self) -> None:
        for _, work in self._stages():
            work()

    def _stages(self) -> Iterable[tuple[str, Callable[[], None]]]:
        works = (self._draft, self._build, self._compile, self._verify, self._commit)
        return zip(ROUND_STAGES, works, strict=True)

    def _draft(self) -> None:
        state = (self._slots, self._context, self._waiting, self._bonus_tokens)
        drafted = self._drafter.run(*state, self._top_k, self.longest - 1)
        self._log_probs.copy_(drafted[0])
        self.candidates.copy_(drafted[1])
        self._context.add_(self._waiting)

    def _build(self) -> None:
        tree = (self._token_ids, self._parents, self.depths, self._positions, self._counts)
        self._ops.build_tree(self._log_probs, self.candidates, self._bonus_tokens, self._budgets, self._past, *tree)

    def _compile(self) -> None:
        self._ops.packed_mask(self._parents, self._mask)

    def _verify(self) -> None:
        place = Place(self._slots, self._past, self._mask)
        logits, tapped = self._target.run(self._token_ids, self._positions, place)
        assert tapped is not None, "a target built for a block drafter taps its states"
        self._taps.copy_(tapped)
        self._choices.copy_(self.choose(logits))
        following = (self._path, self._lengths, self._next_bonus_tokens, self._next_past)
        self._ops.walk(self._parents, self._token_ids, self._choices, self._counts, self._past, *following)

    def _commit(self) -> None:
        """Keep the path's rows and states, write the results into the ring, and set the state for the next round."""
        kept = self._path[:, : self.longest].contiguous()
        self._target.cache.compact(self._slots, self._past, kept, self._lengths)
        path = kept.clamp(min=0).long()
        states = self._taps.gather(1, path[..., None].expand(-1, -1, self._taps.shape[2]))
        self._drafter.hold(self._slots, states)
        result = torch.cat((self._counts[:, None], self._lengths[:, None], self._choices.gather(1, path)), 1)
        self._ring.index_copy_(0, self._rounds % RING, result[None])
        self._host_ring.copy_(self._ring, non_blocking=True)
        self._rounds.add_(1)
        self._past.copy_(self._next_past)
        self._waiting.copy_(self._lengths)
        self._bonus_tokens.copy_(self._next_bonus_tokens)

    def choose(self, logits: Tensor) -> Tensor:
        """The target's token after each node, int32 [N, T], from logits [N, T, V], which are changed. One draw serves
        all nodes of a depth: at most one of them is on the path."""
        if self._sampled:
            depths = torch.arange(1 + self._drafter.dims.draft_length, device=logits.device)
            noise = gumbel(self._seeds, self._past[:, None] + 1 + depths, logits.shape[-1])
            drawn = noise.mul_(self._temperatures[:, None, None])
            logits += drawn.gather(1, self.depths.long()[..., None].expand_as(logits))
        return logits.argmax(-1).to(torch.int32)
