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
        log_weights: Tensor, outlook_depths: Tensor,
    ) -> None:  # fmt: skip
        """Trees of log_probs [N, L, K] into the int32 tensors [N, T], and their sizes, root included, into counts. Of
        the first O nodes of a larger tree, root not counted, the log-weights float32 and depths int32 [N, O]; −inf and
        0 where there is none, as with a budget of 0."""
        outlook = log_weights.shape[1]
        for n, budget in enumerate(budgets.tolist()):
            grown = build_tree(log_probs[n].numpy(), candidates[n].numpy(), max(budget, outlook) if budget else 0)
            seen, tree = grown.cut(outlook), grown.cut(budget)
            log_weights[n], outlook_depths[n] = -torch.inf, 0
            log_weights[n, : len(seen)] = torch.from_numpy(seen.log_weights)
            outlook_depths[n, : len(seen)] = torch.from_numpy(seen.depths)
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

    def commit(
        self, parents: Tensor, token_ids: Tensor, choices: Tensor, counts: Tensor, log_weights: Tensor,
        outlook_depths: Tensor, slot_ids: Tensor, holds: Tensor, active: Tensor, before: Tensor, tapped: Tensor,
        cache: Tensor, waiting: Tensor, states: Tensor, result: Tensor,
    ) -> None:  # fmt: skip
        """Keep the rows of the accepted paths in the cache [planes, slots, Hkv, S, D], their tapped states [N, T, M·H]
        in the buffers waiting [slots, B, M·H] of slots that hold them, the next states [4, slots] of active ones, and
        what the host is told in result [N, width]; `before` are the states [4, N] until now."""
        states.index_copy_(1, slot_ids.long(), before)
        longest = result.shape[1] // 2 - 1 - parents.shape[1] - log_weights.shape[1]
        for n, (size, slot) in enumerate(zip(counts.tolist(), slot_ids.tolist(), strict=True)):
            nodes = torch.from_numpy(
                _native.walk(parents[n, :size].numpy(), token_ids[n, 1:size].numpy(), choices[n, :size].numpy())
            ).long()
            path = torch.full((longest,), -1)
            path[: len(nodes)] = nodes
            past, _, held, _ = before[:, n].tolist()
            cache[:, slot, :, past : past + len(nodes)] = cache[:, slot][:, :, past + nodes]
            if holds[n]:
                waiting[slot, held : held + len(nodes)] = tapped[n, nodes].to(waiting.dtype)
            if active[n]:
                states[PAST - 1, slot] += len(nodes)
                states[WAITING - 1, slot] += len(nodes) * holds[n]
                states[BONUS - 1, slot] = choices[n, nodes[-1]]
            said = torch.tensor([size, len(nodes)]), choices[n, path.clamp(min=0)], path
            drafted = token_ids[n], parents[n], log_weights[n].view(torch.int32), outlook_depths[n]
            result[n] = torch.cat((*said, *drafted))


class BlockOnDevice(Drafter):
    """A drafter of blocks that takes part in such rounds. Tapped states wait for its next pass in a buffer."""

    dims: Any  # has `draft_length`, `block_size` and `head_size`
    cache: DeviceCache
    waiting: Tensor  # [slots, 1 + L, M·H]: the states that wait
    counts: list[int]  # how many, of each slot

    @abstractmethod
    def run(
        self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int, reach: int
    ) -> tuple[Tensor, ...]:
        """Process the waiting states and draft behind them, for int32 [N] each: of the first `reach` positions, P,
        log-probabilities [N, P, K], falling, and the candidates int32 [N, P, K]. Nothing where P is 0."""

    def advance(self, slot: int, held: int, *, absorbed: bool) -> None:
        """Count a round that ran on the device: it processed the states that waited, if `absorbed`, and left so many
        others in the buffer."""
        if absorbed:
            self.cache.append(slot, self.counts[slot])
            self.counts[slot] = 0
        self.counts[slot] += held


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
        told, outlook = columns.ints[:, :count], self._shapes.outlook(tokens)
        slots, state = self._entered(told, ENTERS)
        past, _, _, bonus_tokens = state
        positions, token_ids, parents, depths, choices = slots.new_empty(5, count, tokens)
        counts = slots.new_empty(count)
        log_weights, outlook_depths = self._log_probs.new_empty(count, outlook), slots.new_empty(count, outlook)
        tree = (token_ids, parents, depths, positions, counts, log_weights, outlook_depths)
        drafted = self._drafted(count, self._shapes.candidates(tokens))
        ops.build_tree(*drafted, bonus_tokens, told[BUDGET], past, *tree)
        mask = slots.new_empty(count, tokens, mask_words(tokens))
        ops.packed_mask(parents, mask)
        network = target.network
        hidden, tapped = network.forward(token_ids, positions, Place(slots, past, mask), MaskMode.TREE)
        assert tapped is not None, "a target built for a block drafter taps its states"
        draws = Draws(positions, columns.temperatures[:count], columns.seeds[:count])
        network.product.choose(hidden.flatten(0, 1), network.head, draws, choices, target.logits, ops.choose)
        result = self.results[: count * self.width(tokens)].view(count, -1)
        ops.commit(
            parents, token_ids, choices, counts, log_weights, outlook_depths, slots, told[HOLDS], told[ACTIVE], state,
            tapped.to(self._drafter.waiting.dtype), target.cache.slab, self._drafter.waiting, self._states, result,
        )  # fmt: skip

    def _entered(self, told: Tensor, enters: int) -> tuple[Tensor, Tensor]:
        """The slots, and their states [4, N]: those told where the column `enters` says so."""
        slots = told[SLOT]
        return slots, torch.where(told[enters].bool(), told[_STATE], self._states.index_select(1, slots))

    def _drafted(self, count: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and candidates [N, L, K]."""
        shape = count, self._shapes.longest_draft, top_k
        size = count * self._shapes.longest_draft * top_k
        return self._log_probs[:size].view(shape), self._candidates[:size].view(shape)
