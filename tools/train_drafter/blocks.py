"""Blocks at random anchors in the target's answers, and the drafter's loss on them.

Letters: N sequences, T tokens of the longest, A anchors a sequence, B block size, R drafted positions before the texts'
ends, V vocabulary, K tapped layers, H hidden size. An anchor is the position of a bonus token, from which a drafter is
to name the B-1 tokens after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .settings import DrafterSettings
from .target import Answer, Target


@dataclass(frozen=True)
class Texts:
    """Some answers and the target's states of them, computed anew: to store them takes 2·(K+1)·H bytes a token."""

    tokens: Tensor  # [N, T]
    lengths: Tensor  # [N]
    heat: Tensor  # [N], temperatures
    taps: Tensor  # [N, T, K·H]
    final: Tensor  # [N, T, H], the states that the head reads


@dataclass(frozen=True)
class Blocks:
    """What a drafter reads, and the truth by drafted position."""

    texts: Texts
    anchor: Tensor  # [N, A], also the number of context rows that each block sees
    positions: Tensor  # [N, A, B]
    labels: Tensor  # [N, A, B-1]
    before: Tensor  # [N, A, B-1], the token before each label
    valid: Tensor  # [N, A, B-1], False past the end
    final: Tensor  # [N, A, B-1, H], the target's states that predict the labels


def read_texts(target: Target, answers: Sequence[Answer]) -> Texts:
    device = target.embedding.device
    tokens = pad_sequence([torch.tensor(a.ids) for a in answers], batch_first=True).to(device)
    final, taps = target.states(tokens)
    lengths, heat = ([len(a.ids) for a in answers], [a.temperature for a in answers])
    return Texts(tokens, torch.tensor(lengths, device=device), torch.tensor(heat, device=device), taps, final)


def cut_blocks(texts: Texts, anchor: Tensor, block: int, end: Tensor | None = None) -> Blocks:
    """Blocks at `anchor` [N, A], valid before `end` [N, A], by default the texts' ends."""
    anchor = anchor.to(texts.tokens.device)
    end = texts.lengths[:, None] if end is None else end.to(anchor.device)
    positions = anchor[:, :, None] + torch.arange(block, device=anchor.device)
    places = positions[:, :, 1:]
    reachable = places.clamp(max=texts.tokens.shape[1] - 1)
    rows = torch.arange(len(anchor), device=anchor.device)[:, None, None]
    return Blocks(
        texts=texts,
        anchor=anchor,
        positions=positions,
        labels=texts.tokens[rows, reachable],
        before=texts.tokens[rows, reachable - 1],
        valid=places < end[:, :, None],
        final=texts.final[rows, reachable - 1],
    )


def random_anchors(answers: Sequence[Answer], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors in the answers, from the first token of each to the last but one, and the ends of theirs, [N, count]."""
    drawn = []
    for a in answers:
        places = torch.tensor([(at, end) for begin, end in a.spans for at in range(begin, max(begin + 1, end - 1))])
        drawn.append(places[torch.randint(len(places), (count,), generator=generator)])
    anchor, end = torch.stack(drawn).unbind(-1)
    return anchor, end


def drop_channels(texts: Texts, share: float, generator: torch.Generator) -> Texts:
    """The texts with a random `share` of each one's tapped channels zero and the rest larger by as much."""
    count, _, channels = texts.taps.shape
    kept = torch.rand(count, 1, channels, generator=generator).to(texts.taps.device) >= share
    return replace(texts, taps=texts.taps * (kept / (1 - share)).to(texts.taps.dtype))


def block_loss(model: Any, blocks: Blocks, target: Target, settings: DrafterSettings) -> Tensor:
    """Cross entropy weighted by exp(-(k-1)/decay) at draft position k.

    The truth is the target's distribution at the answer's temperature; on greedy text, at temperature 1, and a part
    `label_share` of it is the token itself.
    """
    valid, head = blocks.valid, target.head
    states = model.drafts(blocks, target.embedding)[valid]
    logits = model.logits(states, blocks.before[valid], head)  # [R, V]
    steps = torch.arange(valid.shape[2], device=valid.device)
    weights = torch.exp(-steps / settings.position_decay).expand(valid.shape)[valid]
    heat = blocks.texts.heat[:, None, None].expand(valid.shape)[valid]
    with torch.no_grad():
        truth = torch.softmax((blocks.final[valid] @ head.T).float() / torch.where(heat > 0, heat, 1)[:, None], -1)
        hard = settings.label_share * (heat == 0)
        truth.mul_(1 - hard[:, None]).scatter_add_(1, blocks.labels[valid][:, None], hard[:, None])
        truth = truth.to(logits.dtype)
    expected = (truth * logits).sum(-1, dtype=torch.float32)
    return ((logits.float().logsumexp(-1) - expected) * weights).sum() / weights.sum().clamp(min=1)
