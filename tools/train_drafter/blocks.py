"""Blocks at random anchors in the target's answers, and the drafter's loss on them.

Letters: N sequences, T tokens of the longest, A anchors a sequence, B block size, R = N·A·(B-1) drafted positions,
C candidate tokens, V vocabulary, K tapped layers, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.model import Drafter

from .generation import Record
from .settings import DrafterSettings


@dataclass(frozen=True)
class Blocks:
    """One micro-batch: the drafter's inputs, and the truth by drafted position."""

    taps: Tensor  # [N, T, K·H] bf16
    ids: Tensor  # [N, A·B], bonus and masks
    positions: Tensor  # [N, A·B]
    anchor: Tensor  # [N, A], also the number of context rows that each block sees
    labels: Tensor  # [N, A, B-1]
    valid: Tensor  # [N, A, B-1], False past the end
    top_ids: Tensor  # [N, A, B-1, k], the target's most probable tokens there
    top_shares: Tensor  # [N, A, B-1, k], their probabilities at the answer's temperature, 1 in all
    greedy: Tensor  # [N]


def make_blocks(records: Sequence[Record], anchor: Tensor, block: int, mask: int, device: torch.device) -> Blocks:
    """Blocks at `anchor` [N, A], the positions of bonus tokens."""
    count, anchors = anchor.shape
    lengths = torch.tensor([len(r.ids) for r in records])
    width = int(lengths.max())

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)

    ids = padded([torch.tensor(r.ids) for r in records])
    anchor, lengths = anchor.to(device), lengths.to(device)
    positions = anchor[:, :, None] + torch.arange(block, device=device)
    places = positions[:, :, 1:]
    reachable = places.clamp(max=width - 1).reshape(count, -1)
    inputs = torch.full((count, anchors, block), mask, device=device)
    inputs[:, :, 0] = ids.gather(1, anchor)
    rows = torch.arange(count, device=device)[:, None]
    heat = torch.tensor([r.temperature or 1.0 for r in records], device=device)[:, None, None]
    shape = (count, anchors, block - 1)
    logits = padded([r.top_logits for r in records])[rows, reachable - 1].float()
    return Blocks(
        taps=padded([r.taps for r in records]),
        ids=inputs.view(count, -1),
        positions=positions.view(count, -1),
        anchor=anchor,
        labels=ids.gather(1, reachable).view(shape),
        valid=places < lengths[:, None, None],
        top_ids=padded([r.top_ids for r in records])[rows, reachable - 1].long().view(*shape, -1),
        top_shares=torch.softmax(logits / heat, -1).view(*shape, -1),
        greedy=torch.tensor([r.temperature == 0 for r in records], device=device),
    )


def random_anchors(records: Sequence[Record], count: int, generator: torch.Generator) -> Tensor:
    """Anchors [N, count] in the answers, from the first token of each to the last but one."""
    first = torch.tensor([r.prompt for r in records])[:, None]
    span = (torch.tensor([len(r.ids) - 1 for r in records])[:, None] - first).clamp(min=1)
    return first + (torch.rand(len(records), count, generator=generator) * span).long().clamp(max=span - 1)


def drop_channels(blocks: Blocks, share: float, generator: torch.Generator) -> Blocks:
    """The blocks with a random `share` of every answer's tapped channels zero and the rest larger by as much."""
    count, _, channels = blocks.taps.shape
    kept = torch.rand(count, 1, channels, generator=generator).to(blocks.taps.device) >= share
    return replace(blocks, taps=blocks.taps * (kept / (1 - share)).to(blocks.taps.dtype))


def draft_states(model: Drafter, embedding: Tensor, blocks: Blocks, block: int) -> Tensor:
    """Final states [N, A, B-1, H] of the masked positions; the target's head makes logits of them."""
    dtype = model.fc.weight.dtype
    context = model.context(blocks.taps.to(dtype), torch.arange(blocks.taps.shape[1], device=embedding.device))
    hidden = model(F.embedding(blocks.ids, embedding).to(dtype), blocks.positions, context, blocks.anchor)
    return hidden.view(len(blocks.ids), -1, block, hidden.shape[-1])[:, :, 1:]


def choose_candidates(needed: Tensor, vocabulary: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ids [C], corrections [C]): all needed tokens and random others, at most `count` of them unless all are needed.

    A random token stands for all that were not drawn, hence the logarithm added to its logit: the sum of exponentials
    over the candidates is then that over the vocabulary, in expectation. A full head would cost more than the drafter.
    """
    chosen = torch.zeros(vocabulary, dtype=torch.bool)
    chosen[needed.cpu()] = True
    ids, rest = chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=generator)[: max(0, count - len(ids))]]
    corrections = torch.zeros(len(ids) + len(drawn))
    if len(drawn):
        corrections[len(ids) :] = math.log(len(rest) / len(drawn))
    return torch.cat([ids, drawn]), corrections


class Normaliser(torch.autograd.Function):
    """Weighted sum over rows of the logarithm of the softmax's denominator.

    Its gradient is made along with it: the probabilities [R, C] need not be kept, nor their exponentials taken twice.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, corrections: Tensor, weights: Tensor) -> Tensor:
        """states [R, H], head [C, H], corrections [C] added to the logits, weights [R] -> []."""
        logits = torch.addmm(corrections, states, head.T)
        shares = torch.softmax(logits, -1).mul_(weights[:, None].to(logits.dtype))
        ctx.save_for_backward(shares @ head)
        return (logits.float().logsumexp(-1) * weights).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (found,) = ctx.saved_tensors
        return found * gradient.to(found.dtype), None, None, None


def block_loss(states: Tensor, blocks: Blocks, head: Tensor, settings: DrafterSettings, generator: Any) -> Tensor:
    """Cross entropy weighted by exp(-(k-1)/decay) at draft position k.

    The truth is the target's distribution; on greedy text, a part `label_share` of it is the token itself.
    """
    steps = torch.arange(states.shape[2], device=states.device)
    weights = (torch.exp(-steps / settings.position_decay) * blocks.valid)[blocks.valid]
    labels, top_ids = blocks.labels[blocks.valid], blocks.top_ids[blocks.valid]
    needed = torch.cat([labels, top_ids.flatten()])
    ids, corrections = choose_candidates(needed, len(head), settings.candidates, generator)
    kept = states[blocks.valid]
    hard = (settings.label_share * blocks.greedy)[:, None, None].expand(blocks.valid.shape)[blocks.valid]
    # The expected logit of the truth is the product with the expected row of the head: no gradient of a gather.
    soft = torch.einsum("rk,rkh->rh", blocks.top_shares[blocks.valid], head[top_ids].float())
    row = torch.lerp(soft, head[labels].float(), hard[:, None])
    weights = weights / weights.sum().clamp(min=1)
    normaliser: Tensor = Normaliser.apply(kept, head[ids.to(kept.device)], corrections.to(kept), weights)
    return normaliser - (kept * (row * weights[:, None]).to(kept)).sum(dtype=torch.float32)
