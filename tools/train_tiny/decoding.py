"""Autoregressive, DFlash (chain) and DDTree decoding of one sequence in plain torch.

One loop serves all three: a tree of drafts is verified in one target pass in which each node sees its ancestors, and
the target's own choice at every node visited says where to go on. The empty tree is autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .model import Drafter, KeyValue, Target
from .settings import EOS, MASK
from .trees import EMPTY, Tree

STOPS = frozenset({0, EOS})


MakeTree = Callable[[Tensor], Tree]
"""From log-probabilities [L, V] of the draft positions to a tree."""


class Decoder:
    """A target and its drafter. `block` may be below the drafter's own block size: fewer masks, shorter drafts."""

    def __init__(self, target: Target, drafter: Drafter, block: int | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.block = block or int(drafter.cfg["block_size"])

    def _draft(self, bonus: int, start: int, context: list[KeyValue]) -> Tensor:
        """Log-probabilities [B-1, V] of the tokens after the bonus token, which is at position `start`."""
        ids = torch.full((1, self.block), MASK)
        ids[0, 0] = bonus
        positions = torch.arange(start, start + self.block)
        hidden = self.drafter(self.target.embed_tokens(ids), positions, context)
        return torch.log_softmax(self.target.head(hidden[0, 1:]), -1)

    @torch.no_grad()
    def generate(
        self, prompt: list[int], make_tree: MakeTree | None, max_new: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[int]]:
        """The answer up to EOS and the tokens of every round, the bonus included and none past EOS counted.

        The prefill's token belongs to no round: the rounds sum to the length of the answer less one.
        """
        target, generator = self.target, torch.Generator().manual_seed(seed)

        def choose(hidden: Tensor) -> list[int]:
            logits = target.head(hidden)
            if temperature <= 0:
                return logits.argmax(-1).tolist()
            return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0].tolist()

        start = len(prompt)
        cache = target.new_cache(1, start + max_new + 160)
        hidden, taps = target(torch.tensor([prompt]), taps=self.drafter.taps, cache=cache)
        answer, rounds = choose(hidden[0, -1:]), []
        context: list[KeyValue] = []
        while len(answer) < max_new and not STOPS & set(answer):
            tree = EMPTY
            if make_tree is not None:
                new = self.drafter.context(taps, torch.arange(start - taps.shape[1], start))
                pairs = zip(context, new, strict=True)
                context = (
                    [(torch.cat([k0, k], 2), torch.cat([v0, v], 2)) for (k0, v0), (k, v) in pairs] if context else new
                )
                tree = make_tree(self._draft(answer[-1], start, context))
            nodes = 1 + len(tree.tokens)
            sees = torch.eye(nodes, dtype=torch.bool)
            children: list[dict[int, int]] = [{} for _ in range(nodes)]
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
                sees[node] |= sees[parent]
                children[parent][token] = node
            mask = torch.cat([torch.ones(nodes, start, dtype=torch.bool), sees], 1)
            positions = start + torch.tensor([0, *tree.depths])
            ids = torch.tensor([[answer[-1], *tree.tokens]])
            hidden, taps = target(ids, self.drafter.taps, cache, start, positions, mask)
            choices = choose(hidden[0])
            path = [0]
            while (token := choices[path[-1]]) in children[path[-1]]:
                path.append(children[path[-1]][token])
            kept = torch.tensor(path)
            for store in (array for pair in cache for array in pair):
                store[:, :, start : start + len(path)] = store[:, :, start + kept]
            taps, start = taps[:, kept], start + len(path)
            answer += [tree.tokens[node - 1] for node in path[1:]] + [token]
            rounds.append(len(path))
        end = next((i + 1 for i, token in enumerate(answer) if token in STOPS), len(answer))
        answer = answer[: min(end, max_new)]
        if rounds:
            rounds[-1] -= sum(rounds) + 1 - len(answer)
        return answer, rounds
