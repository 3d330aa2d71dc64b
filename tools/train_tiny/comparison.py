"""Drafters side by side: tokens per round at equal budgets on the held-out prompts.

At temperature 0 the target's answer does not depend on the drafts, so every answer is written once, and the rounds
follow from the trees that a drafter would make at the positions where its rounds begin. Budgets nest: the tree of a
small budget is the beginning of a large one's, so a position's tree is made once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .eagle import Eagle3, Growth, load_eagle3
from .generation import continue_batch
from .model import Drafter, KeyValue, MarkovHead, Target, load_drafter, load_target
from .settings import MASK, ComparisonSettings
from .tokenizer import load, prompt_ids
from .trees import Ranked, Tree, best_first, best_prefixes, chain, grow

CHUNK = 32
"""Blocks of one answer in a pass: all its logits at once would be large."""


@dataclass(frozen=True)
class Answered:
    """A prompt and the target's greedy answer: ids [S], and the tapped states [S, K*H] of every position."""

    domain: str
    ids: list[int]
    prompt: int
    taps: Tensor


TreeAt = Callable[[int], Tree]
"""The tree, of the largest budget, of a round whose bonus token is at the given position of an answer."""
Method = Callable[[Answered], TreeAt]


@torch.no_grad()
def answers(folder: Path, taps: tuple[int, ...], max_new: int) -> list[Answered]:
    """The target's greedy answers to prompts.jsonl."""
    target, tokenizer = load_target(folder / "target"), load(folder / "tokenizer")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    found = []
    for row in rows:
        prompt = prompt_ids(tokenizer, row["prompt"])
        (answer,) = continue_batch(target, [prompt], torch.tensor([False]), max_new, torch.Generator())
        ids = prompt + answer
        found.append(Answered(row["domain"], ids, len(prompt), target(torch.tensor([ids]), taps)[1][0]))
    return found


class BlockTrees:
    """Trees over a DFlash or DSpark drafter's logits, which one pass gives for every position of an answer."""

    def __init__(self, model: Drafter, target: Target, settings: ComparisonSettings, answered: Answered) -> None:
        self.head = model.markov_head
        self.settings = settings
        self.first = answered.prompt
        self.ids = answered.ids
        block, places = int(model.cfg["block_size"]), torch.arange(len(answered.ids))
        context = model.context(answered.taps[None], places)
        logits = []
        for anchor in places[answered.prompt :].split(CHUNK):
            ids = torch.full((len(anchor), block), MASK)
            ids[:, 0] = torch.tensor(answered.ids)[anchor]
            positions = anchor[:, None] + torch.arange(block)
            embedded = target.embed_tokens(ids.view(1, -1))
            hidden = model(embedded, positions.view(1, -1), context, anchor[None])
            logits.append(target.head(hidden.view(len(anchor), block, -1)[:, 1:]))
        self.logits = torch.cat(logits)  # [anchors, B-1, V]

    def chain(self, anchor: int) -> Tree:
        """The most probable token at every depth, after the one chosen before it."""
        logits = self.logits[anchor - self.first]
        if self.head is None:
            return chain(logits)
        tokens = [self.ids[anchor]]
        for row in logits:
            tokens.append(self._after(self.head, row, tokens[-1])[1][0])
        return Tree(tokens[1:], list(range(len(logits))), list(range(1, len(logits) + 1)))

    def _after(self, head: MarkovHead, logits: Tensor, token: int) -> Ranked:
        """The candidates of a position [V], ranked by what the head says of them after `token`."""
        base, ids = logits.topk(self.settings.candidates)
        biases = head.markov_w2.weight[ids] @ head.markov_w1.weight[token]
        values, order = torch.log_softmax(base + biases, -1).sort(descending=True)
        return values.tolist(), ids[order].tolist()

    def heap(self, anchor: int) -> Tree:
        """The most probable prefixes, by what each token's parent says of it where there is a Markov head."""
        logits = self.logits[anchor - self.first]
        head, budget = self.head, self.settings.budgets[-1]
        if head is None:
            return best_first(torch.log_softmax(logits, -1), budget)

        @functools.cache
        def children(depth: int, token: int) -> Ranked:
            return self._after(head, logits[depth], token) if depth < len(logits) else ([], [])

        bonus = self.ids[anchor]
        return best_prefixes(lambda _, token, depth: children(depth, token if depth else bonus), budget)


class Eagle3Trees:
    """Trees that an EAGLE-3 drafter grows at a position of an answer."""

    def __init__(self, model: Eagle3, target: Target, settings: ComparisonSettings, answered: Answered) -> None:
        self.model = model
        self.target = target
        self.settings = settings
        self.ids = answered.ids
        after = torch.tensor([answered.ids[1:] + answered.ids[:1]])
        self.features, self.past = model.context(target, answered.taps[None], after)

    def _grow(self, anchor: int, width: int, children: int, by_depth: bool) -> Tree:
        past: KeyValue = self.past[0][:, :, :anchor], self.past[1][:, :, :anchor]
        growth = Growth(self.model, self.target, self.features[0, :anchor], past, self.ids[anchor], children)
        return grow(growth, self.settings.budgets[-1], width, self.settings.max_depth, by_depth=by_depth)

    def chain(self, anchor: int) -> Tree:
        return self._grow(anchor, 1, 1, by_depth=True)

    def eagle2(self, anchor: int) -> Tree:
        return self._grow(anchor, self.settings.width, self.settings.width, by_depth=True)

    def heap(self, anchor: int) -> Tree:
        return self._grow(anchor, self.settings.width, self.settings.budgets[-1], by_depth=False)


def accepted(tree: Tree, budget: int, truth: Sequence[int]) -> int:
    """How many of the tree's first `budget` drafts lie on the path `truth`."""
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(tree.tokens[:budget], tree.parents[:budget], strict=True), 1)
    }
    node = depth = 0
    while depth < len(truth) and (node, truth[depth]) in children:
        node, depth = children[node, truth[depth]], depth + 1
    return depth


def rounds(answered: Answered, tree_at: TreeAt, budget: int) -> list[int]:
    """Tokens of every round of an answer; the first token is the prefill's and belongs to none."""
    anchor, counts = answered.prompt, []
    while anchor + 1 < len(answered.ids):
        truth = answered.ids[anchor + 1 :]
        counts.append(min(1 + accepted(tree_at(anchor), budget, truth), len(truth)))
        anchor += counts[-1]
    return counts


def methods(folder: Path, target: Target, settings: ComparisonSettings) -> dict[tuple[str, str], Method]:
    """By drafter, which is a folder's name, and by tree; drafters that `folder` lacks are left out."""
    found: dict[tuple[str, str], Method] = {}
    for name in ("drafter", "dspark"):
        if (folder / name).exists():
            block = functools.partial(BlockTrees, load_drafter(folder / name), target, settings)
            found |= {(name, "chain"): _method(block, "chain"), (name, "heap"): _method(block, "heap")}
    if (folder / "eagle3").exists():
        grown = functools.partial(Eagle3Trees, load_eagle3(folder / "eagle3"), target, settings)
        found |= {("eagle3", tree): _method(grown, tree) for tree in ("chain", "eagle2", "heap")}
    return found


def _method(trees: Callable[[Answered], BlockTrees | Eagle3Trees], tree: str) -> Method:
    return lambda answered: getattr(trees(answered), tree)


@torch.no_grad()
def compare(folder: Path, settings: ComparisonSettings) -> dict[str, Any]:
    """Tokens per round, all rounds alike, by drafter, tree, domain ("all" for all) and budget."""
    torch.set_num_threads(1)
    target = load_target(folder / "target")
    taps = load_drafter(folder / "drafter").taps
    prompts = answers(folder, taps, settings.max_new_tokens)
    domains = [*dict.fromkeys(answered.domain for answered in prompts), "all"]
    rows = []
    for (drafter, tree), method in methods(folder, target, settings).items():
        counts: dict[tuple[str, int], list[int]] = {(d, b): [] for d in domains for b in settings.budgets}
        for answered in prompts:
            tree_at = functools.cache(method(answered))
            for budget in settings.budgets:
                found = rounds(answered, tree_at, budget)
                counts[answered.domain, budget] += found
                counts["all", budget] += found
        means = {d: [round(sum(counts[d, b]) / len(counts[d, b]), 3) for b in settings.budgets] for d in domains}
        rows.append({"drafter": drafter, "tree": tree, "tokens_per_round": means})
        print(json.dumps(rows[-1]), flush=True)
    return {"prompts": len(prompts), "budgets": list(settings.budgets), "rows": rows}


TITLES = {"drafter": "DFlash", "dspark": "DSpark", "eagle3": "EAGLE-3"}


def markdown(report: dict[str, Any]) -> str:
    """The report as a table of tokens per round over all prompts."""
    budgets = report["budgets"]
    lines = [
        f"Tokens per round at temperature 0, {report['prompts']} held-out prompts, by drafts a round.",
        "",
        "| drafter | tree | " + " | ".join(map(str, budgets)) + " |",
        "|---|---|" + "---:|" * len(budgets),
    ]
    for row in report["rows"]:
        cells = [f"{value:.2f}" for value in row["tokens_per_round"]["all"]]
        lines.append(f"| {TITLES[row['drafter']]} | {row['tree']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
