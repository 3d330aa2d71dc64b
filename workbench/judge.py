"""Play the rule of automatic budgets and its rivals over recorded drafts, under given costs.

    python -m workbench drafts ENGINE --prompts FILE.jsonl -o known.npz
    python -m workbench judge known.npz [more.npz …] [--machine h100,torch] [--slots 1,4,16,64] [--wrong 0.5]

Reads no clock. A line is a machine, a number of requests side by side, and a recording. Its figures are tokens a
second over those of single tokens: of `auto`, of the chain, of every fixed budget, and for one request of hindsight,
which knows in each round what every size would have had accepted. The last column is `auto` over the best of them but
hindsight. `--wrong 0.5`: a profile in which drafts take half and trees twice what they do. `--busy 4`: rounds seem to
take so much longer now and then, as where other work slows all down alike; figures count what they take without.
`--late`: a round is decided before the one before it is read, its size before its drafts are seen, as on a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, AutoBudgets, Budget, FixedBudget, RoundPlan, SlotInput
from ddtree_trt.runtime.engines.profile import PassTimes, Profile
from ddtree_trt.runtime.tree import DraftTree
from workbench.drafts import Text, load
from workbench.options import integers, print_row

NODES, PAST, STRETCH = 64, 200, 40  # the last are rounds
LOAD = 6  # requests for each slot, or more: when few are left the slots of the quick ones stay empty
FIXED = (1, 2, 4, 8, 12, 16, 24, 32, 64)
PROFILED = (1, 2, 5, 17, 65)  # tree tokens


@dataclass(frozen=True)
class Machine:
    """True times of passes, by slots: of verifications by tree tokens, and of drafts. Linear between and beyond.
    Without buckets a pass takes what one of equal trees of as many rows does."""

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, float]
    buckets: tuple[int, ...] | None = None

    def verify_s(self, trees: Sequence[int]) -> float:
        """Of a pass over trees of so many tokens."""
        slots, tokens = len(trees), sum(trees) / len(trees)
        if self.buckets is not None:
            tokens = next(size for size in self.buckets if size >= max(trees))
        times = [PassTimes(n, 1, 0.0, tuple(self.verify[n].items())).verify_s(np.array(tokens)) for n in self.verify]
        return float(np.interp(slots, list(self.verify), np.array(times)))

    def draft_s(self, slots: int) -> float:
        return float(np.interp(slots, list(self.draft), list(self.draft.values()))) if slots else 0.0

    def budgets(self, slots: int, wrong: float = 1.0) -> AutoBudgets:
        """Those of an engine that serves so many requests, whose profile is wrong by that factor."""

        def times(n: int) -> PassTimes:
            verify = ((t, self.verify_s([t] * n) * (1 if t == 1 else 1 / wrong)) for t in PROFILED)
            return PassTimes(n, 64, self.draft_s(n) * wrong, tuple(verify))

        many = times(slots) if slots > 1 else None
        return AutoBudgets(Costs(Profile("", times(1), None, many), NODES, self.buckets), NODES, 15)


MACHINES = {
    # ONNX Runtime on two cores: the packaged pair in fp32, SmolLM2-135M in int8; beyond 8 and 16 slots continued.
    "tiny": Machine(
        {
            1: {1: 0.33, 2: 0.33, 5: 0.36, 17: 0.72, 65: 2.35},
            8: {1: 0.97, 2: 1.16, 5: 1.95, 17: 5.1, 65: 18.6},
            64: {1: 6.3, 2: 7.8, 5: 14.7, 17: 40.0, 65: 150.0},
        },
        {1: 0.355, 8: 2.24, 64: 17.5},
    ),
    "smollm2": Machine(
        {
            1: {1: 5.2, 2: 5.5, 5: 6.9, 17: 10.2, 65: 23.0},
            16: {1: 11.8, 2: 16.4, 5: 33.2, 17: 90.0, 65: 360.0},
            64: {1: 33.0, 2: 52.0, 5: 118.0, 17: 345.0, 65: 1430.0},
        },
        {1: 1.24, 16: 4.9, 64: 16.5},
    ),
    # The packaged pair with PyTorch on one core, in milliseconds, as if it padded.
    "torch": Machine(
        {n: {t: 2.3 + n * (0.2 + (0.06 + 0.085 * (t - 1) if t > 1 else 0)) for t in (1, 2, 65)} for n in (1, 64)},
        {n: 1.4 + 0.67 * n for n in (1, 64)},
        buckets=(1, 2, 4, 8, 16, 32, 65),
    ),
    # Qwen3-8B's shape in bf16 with a block drafter, measured behind 512 tokens; the largest trees continued.
    "h100": Machine(
        {
            1: {1: 6.57, 4: 6.65, 16: 6.77, 64: 7.07, 128: 8.2},
            4: {1: 6.69, 4: 6.8, 8: 6.95, 16: 7.10, 32: 7.56, 64: 9.04},
            16: {1: 7.09, 4: 7.25, 8: 7.67, 16: 9.04, 32: 13.8, 64: 26.0},
            64: {1: 8.66, 4: 10.28, 8: 15.2, 16: 27.8, 32: 54.0, 64: 106.0},
        },
        {1: 2.2, 4: 2.2, 8: 2.55, 16: 3.3, 32: 4.95, 64: 9.25},
        buckets=(1, 2, 4, 8, 16, 32, 48, 64, 65, 128),
    ),
}


@dataclass
class _Slot:
    text: Text
    budget: Budget
    place: int = 0
    unread: Callable[[], None] = field(default=lambda: None)  # learns from the round before, where it is read late

    @property
    def left(self) -> int:
        return len(self.text.tokens) - 1 - self.place


def play(
    machine: Machine,
    texts: Sequence[Text],
    slots: int,
    make: Callable[[], Budget],
    *,
    width: int | None = None,
    late: bool = False,
    busy: float = 1.0,
) -> tuple[float, int]:
    """(time, tokens) of the answers, `slots` side by side. `width`: most children of a node; 1 makes chains.
    `busy`: how many times as long rounds seem to take in every fourth stretch of them."""
    waiting = deque(texts)
    running: list[_Slot] = []
    seconds, tokens, rounds = 0.0, 0, 0
    while waiting or running:
        running += [_Slot(waiting.popleft(), make()) for _ in range(min(len(waiting), slots - len(running)))]
        inputs = [SlotInput(PAST + s.place, s.left) for s in running]
        plan = RoundPlan.of([s.budget for s in running], inputs, ahead=late)
        nodes = plan.ceilings()
        for s in running:
            s.unread()
        drafts = sum(n > 0 for n in nodes)
        drafted = [s.text.tree(s.place, 2 * n if late else n, width) for s, n in zip(running, nodes, strict=True)]
        if not late:
            nodes = plan.choose([tree if n else None for tree, n in zip(drafted, nodes, strict=True)])
        sizes = [min(n, len(tree)) for n, tree in zip(nodes, drafted, strict=True)]
        draft_s, verify_s = machine.draft_s(drafts), machine.verify_s([1 + n for n in sizes])
        seconds += draft_s + verify_s
        rounds, load = rounds + 1, busy if rounds // STRETCH % 4 == 0 else 1.0
        plan.took(draft_s * load, verify_s * load, sizes)
        for i, (s, n, tree) in enumerate(zip(running, nodes, drafted, strict=True)):
            tokens += _advance(s, tree, n, plan, i, late)
        running = [s for s in running if s.left]
    return seconds, tokens


def _advance(slot: _Slot, drafted: DraftTree, nodes: int, plan: RoundPlan, place: int, late: bool) -> int:
    """Commit what the answer takes of the first nodes of a draft, and learn from it; now, or before the round after the
    next is decided."""
    verified = drafted.cut(nodes)
    path = slot.text.path(slot.place, verified)
    ends, budget, decision = len(path) == slot.left, slot.budget, plan.decisions[place]
    slot.place += len(path)

    def learn() -> None:
        if isinstance(budget, AutoBudget) and decision is not None:
            if late and decision.drafted:
                plan.weigh({place: drafted})
            budget.observe(decision, verified, path, ends=ends)

    slot.unread = learn if late else lambda: None
    if not late:
        learn()
    return len(path)


def hindsight(machine: Machine, texts: Sequence[Text]) -> float:
    """Tokens per time of one request after the other, each round of the best size or without a draft."""
    seconds = tokens = 0.0
    single_s = machine.verify_s([1])
    for text in texts:
        place = 0
        while place < len(text.tokens) - 1:
            path = text.path(place, text.tree(place, NODES)).tolist()
            sizes = [(machine.draft_s(1) + machine.verify_s([1 + n]), m) for m, n in enumerate(path[1:], 2)]
            taken_s, made = max([(single_s, 1), *sizes], key=lambda each: each[1] * single_s - each[0])
            seconds, tokens, place = seconds + taken_s, tokens + made, place + made
    return tokens / seconds


def speeds(machine: Machine, texts: Sequence[Text], slots: int, *, wrong: float = 1.0, **seen: Any) -> dict[str, float]:
    """Tokens per time over those of single tokens, of `auto` and its rivals."""

    def rate(make: Callable[[], Budget], **options: Any) -> float:
        seconds, tokens = play(machine, texts, slots, make, **options)
        return tokens / seconds

    shared = machine.budgets(slots, wrong)
    found = {"auto": rate(lambda: AutoBudget(shared), **seen), "ar": rate(lambda: FixedBudget(0))}
    found["chain"] = rate(lambda: FixedBudget(NODES), width=1)
    for nodes in FIXED:
        found[str(nodes)] = rate(lambda nodes=nodes: FixedBudget(nodes))  # type: ignore[misc]
    return {name: speed / found["ar"] for name, speed in found.items()}


def main(
    texts: list[Path],
    machine: str = ",".join(MACHINES),
    slots: str = "1",
    wrong: Annotated[float, typer.Option(help="the factor by which the first profile is wrong")] = 1.0,
    late: bool = False,
    busy: Annotated[float, typer.Option(help="how much longer rounds seem in every fourth stretch of 40")] = 1.0,
) -> None:
    heads = ["machine", "slots", "texts", "auto", "chain", *map(str, FIXED), "hindsight", "auto / best"]
    print_row(heads, head=True)
    for name, count, path in product(machine.split(","), integers(slots), texts):
        played, known = MACHINES[name], load(path)
        known *= -(-LOAD * count // len(known))
        found = speeds(played, known, count, wrong=wrong, late=late, busy=busy)
        best = max(speed for rival, speed in found.items() if rival != "auto")
        figures = [f"{speed:.2f}" for rival, speed in found.items() if rival != "ar"]
        seen = f"{hindsight(played, known) * played.verify_s([1]):.2f}" if count == 1 else ""
        print_row([name, count, path.stem, *figures, seen, f"{found['auto'] / best:.3f}"])
