"""Decoding rounds that stay on the device: draft, tree build, tree compile, verify and commit in two passes.

They compute what `decoding.loop.decode_round` computes by stages. The state of each slot is on the device, at fixed
addresses, and a pass leaves it as the next one begins; so rounds can be launched ahead of the host (`rounds.py`), which
says which slots take part, and how, in one upload of `Columns`, and reads results. On a GPU each pass is a CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree_trt import _native
from ddtree_trt.device.buffers import RoundShapes
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.passes import mask_words, write_mask
from ddtree_trt.runtime.engines.torch.attention import DeviceCache, Place, load_operators
from ddtree_trt.runtime.engines.torch.products import Draws
from ddtree_trt.runtime.engines.torch.target import TargetPass
from ddtree_trt.runtime.tree import build_tree


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

    def choose(self, logits: Tensor, positions: Tensor, temperatures: Tensor, seeds: Tensor, choices: Tensor) -> None:
        """The target's tokens into choices [N, T], from logits [N, T, V] of nodes at positions [N, T]: the largest, or
        where the slot's temperature is not 0 drawn for the position behind by its seed's noise."""
        choices.copy_(logits.argmax(-1))
        for n, temperature in enumerate(temperatures.tolist()):
            if temperature > 0:
                seed = int(seeds[n]) % (1 << 64)
                for row, (logit, position) in enumerate(zip(logits[n].numpy(), positions[n].tolist(), strict=True)):
                    choices[n, row] = _native.draw_logits(logit, temperature, seed, position + 1)

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


class BlockOnDevice(Drafter):
    """A drafter of blocks that takes part in such rounds. Tapped states wait for its next pass in a buffer."""

    dims: Any  # has `draft_length`, `block_size` and `head_size`
    cache: DeviceCache
    counts: list[int]  # states that wait, of each slot; most 1 + L

    @abstractmethod
    def run(
        self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int, reach: int
    ) -> tuple[Tensor, ...]:
        """Process the waiting states and draft behind them, for int32 [N] each: of the first `reach` positions, P,
        log-probabilities [N, P, K], falling, and the candidates int32 [N, P, K]. Nothing where P is 0."""

    @abstractmethod
    def hold(self, slots: Tensor, counts: Tensor, states: Tensor, path: Tensor, lengths: Tensor) -> None:
        """Put the states of the first `lengths` nodes of paths int32 [N, m], of tapped states [N, T, M·H], behind the
        `counts` that wait in the buffers of slots, int32 [N] each; the host's counts stay as they are."""

    @abstractmethod
    def advance(self, slot: int, held: int, *, absorbed: bool) -> None:
        """Count a round that ran on the device: it processed the states that waited, if `absorbed`, and left so many
        others in the buffer."""


# Columns of int32.
SLOT, PAST, CONTEXT, WAITING, BONUS, ENTERS_DRAFT, ENTERS, BUDGET, ACTIVE, ABSORBS, HOLDS, CHAIN, COLUMNS = range(13)
_STATE = slice(PAST, BONUS + 1)  # of a slot


class Columns:
    """What passes of a round are told of each of their slots, all in one piece of `memory`.

    `ints` int32 [COLUMNS, S]: its number; the state it has unless it goes on from its last round: committed rows of the
    target's cache and of the drafter's, tapped states that wait, and bonus token; whether it takes that state in the
    draft, or in the verification; most draft nodes; whether it takes part at all, or only pads the pass; whether the
    draft takes in what waits; whether it keeps tapped states; whether its tree is a chain. `temperatures` float32 [S],
    `seeds` int64 [S]."""

    def __init__(self, slots: int, device: torch.device, *, pinned: bool = False) -> None:
        stride = -(-slots // 4) * 4  # each column begins at a multiple of 16 bytes
        self.memory = torch.zeros((COLUMNS + 3) * stride, dtype=torch.int32, device=device, pin_memory=pinned)
        self.seeds = self.memory[: 2 * stride].view(torch.int64)
        self.temperatures = self.memory[2 * stride : 3 * stride].view(torch.float32)
        self.ints = self.memory[3 * stride :].view(COLUMNS, stride)


class RoundPasses:
    """The two passes of rounds over `shapes`, their buffers, and the slots' states."""

    def __init__(self, target: TargetPass, drafter: BlockOnDevice, shapes: RoundShapes) -> None:
        self._target, self._drafter, self._shapes = target, drafter, shapes
        device, slots = target.device, target.cache.slots
        if device.type == "cuda":
            load_operators()  # attention without kernels has not loaded them
        # The kernels on a GPU, or on a CPU where they are emulated.
        self._ops: Any = torch.ops.ddtree if device.type == "cuda" or target.kernels else HostOps()
        self.columns = Columns(slots, device)
        # Past, context, waiting states and bonus token of each slot, [4, slots]: as in `Columns`.
        self._states = torch.zeros(BONUS + 1 - PAST, slots, dtype=torch.int32, device=device)
        # What the draft leaves to the verification, each for [N, L, K].
        most = max(n * shapes.longest_draft * shapes.candidates(t) for n, t in shapes.verifications())
        self._log_probs = torch.zeros(most, device=device)
        self._candidates = torch.zeros(most, dtype=torch.int32, device=device)
        size = max(n * self.width(t) for n, t in shapes.verifications())
        self.results = torch.zeros(size, dtype=torch.int32, device=device)  # [N, width] of the last verification

    def longest(self, tokens: int) -> int:
        """Nodes of the longest path in a tree of T tokens, m."""
        return min(tokens, 1 + self._shapes.longest_draft)

    def width(self, tokens: int) -> int:
        """Values of a slot's results: nodes with the root; the path's length, the target's choices along it [m], and
        its nodes [m], padded with −1; token ids and parents [T] of the tree; log-weights, as bits of float32, and
        depths [O] of the nodes weighed."""
        return 2 + 2 * self.longest(tokens) + 2 * tokens + 2 * self._shapes.outlook(tokens)

    def draft(self, count: int, reach: int, top_k: int) -> None:
        """Take in what waits for the drafter, of the first slots told, N, and where P is not 0 draft so many positions
        of K candidates for them."""
        told, drafter = self.columns.ints[:, :count], self._drafter
        slots, state = self._entered(told, ENTERS_DRAFT)
        past, context, waiting, bonus_tokens = state
        found = drafter.run(slots, context, waiting, bonus_tokens, top_k, reach)
        if reach:
            log_probs, candidates = self._drafted(count, top_k)
            log_probs.fill_(-torch.inf)
            log_probs[:, :reach] = found[0]
            log_probs[:, :, 1:].masked_fill_(told[CHAIN].bool()[:, None, None], -torch.inf)
            candidates[:, :reach] = found[1]
        absorbed = waiting * told[ABSORBS]
        self._states.index_copy_(
            1, slots.long(), torch.stack((past, context + absorbed, waiting - absorbed, bonus_tokens))
        )

    def verify(self, count: int, tokens: int) -> None:
        """Build the trees, of T tokens at most, of the first slots told, N; verify and walk them, and commit."""
        columns, target, ops = self.columns, self._target, self._ops
        told, longest, outlook = columns.ints[:, :count], self.longest(tokens), self._shapes.outlook(tokens)
        slots, state = self._entered(told, ENTERS)
        past, context, waiting, bonus_tokens = state
        token_ids, parents, depths, positions, choices, path = slots.new_empty(6, count, tokens)
        counts, lengths, following, next_past = slots.new_empty(4, count)
        log_weights, outlook_depths = self._log_probs.new_empty(count, outlook), slots.new_empty(count, outlook)
        tree = (token_ids, parents, depths, positions, counts, log_weights, outlook_depths)
        drafted = self._drafted(count, self._shapes.candidates(tokens))
        ops.build_tree(*drafted, bonus_tokens, told[BUDGET], past, *tree)
        mask = slots.new_empty(count, tokens, mask_words(tokens))
        ops.packed_mask(parents, mask)
        hidden, tapped = target.network.forward(token_ids, positions, Place(slots, past, mask), MaskMode.TREE)
        assert tapped is not None, "a target built for a block drafter taps its states"
        draws = Draws(positions, columns.temperatures[:count], columns.seeds[:count])
        target.network.choose(hidden, draws, choices, target.logits, ops.choose)
        ops.walk(parents, token_ids, choices, counts, past, path, lengths, following, next_past)

        kept = path[:, :longest].contiguous()
        target.cache.compact(slots, past, kept, lengths)
        held = lengths * told[HOLDS]
        self._drafter.hold(slots, waiting, tapped, kept, held)
        said = choices.gather(1, kept.clamp(min=0).long())
        weights = log_weights.view(torch.int32)
        found = (counts[:, None], lengths[:, None], said, kept, token_ids, parents, weights, outlook_depths)
        self.results[: count * self.width(tokens)].view(count, -1).copy_(torch.cat(found, 1))
        after = torch.stack((next_past, context, waiting + held, following))
        self._states.index_copy_(1, slots.long(), torch.where(told[ACTIVE].bool(), after, state))

    def _entered(self, told: Tensor, enters: int) -> tuple[Tensor, Tensor]:
        """The slots, and their states [4, N]: those told where the column `enters` says so."""
        slots = told[SLOT]
        return slots, torch.where(told[enters].bool(), told[_STATE], self._states.index_select(1, slots))

    def _drafted(self, count: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and candidates [N, L, K]."""
        shape = count, self._shapes.longest_draft, top_k
        size = count * self._shapes.longest_draft * top_k
        return self._log_probs[:size].view(shape), self._candidates[:size].view(shape)
