"""Automatic budgets under load, on simulated machines: as fast as the best fixed one, whatever it is, and never slow.

Time is simulated, and drafters are of all qualities. How many requests are side by side decides what is best: on the
GPU the whole tree for one, eight nodes for sixteen, and few or none for 64. On the processor a draft of many slots
costs several passes: only a drafter that is nearly always right is worth it there, and then large trees are.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from roofline import Gpu, Machine, Processor, automatic, fixed, serve
from simulated import GOOD, LIAR, Quality, Request, Spent

GPU, PROCESSOR = Gpu(), Processor()
FIXED = (0, 1, 3, 7, 15, 31, 63)  # every one fills a bucket; 0 is autoregressive decoding
SURE, MIDDLING, WEAK = Quality(0.985, 0.004), Quality(0.75, 0.05), Quality(0.5, 0.1)
TRAFFIC = {
    "sure": (SURE, SURE),
    "good": (GOOD, GOOD),
    "middling": (MIDDLING, MIDDLING),
    "weak": (WEAK, WEAK),
    "useless": (LIAR, LIAR),
    "half of it useless": (GOOD, LIAR),
}


def requests(traffic: str, slots: int) -> list[Request]:
    count = max(16, 4 * slots)
    lengths = np.random.default_rng(3).integers(96, 193, count)
    return [Request(TRAFFIC[traffic][i % 2], int(n), i) for i, n in enumerate(lengths)]


def per_second(spent: Spent) -> float:
    return spent.tokens / spent.seconds


@functools.cache
def fixed_speeds(machine: Gpu | Processor, traffic: str, slots: int) -> dict[int, float]:
    """Tokens a second by budget, of those that come into question: many slots, and useless drafts, take small ones."""
    budgets = FIXED[: 3 if traffic == "useless" else 5 if slots == 64 else 6 if slots == 16 else len(FIXED)]
    return {nodes: per_second(serve(machine, requests(traffic, slots), slots, fixed(nodes))) for nodes in budgets}


@pytest.mark.parametrize("slots", [1, 4, 16, 64])
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("machine", [GPU, PROCESSOR], ids=["gpu", "processor"])
def test_automatic_budgets_are_as_fast_as_the_best_fixed_one(
    machine: Gpu | Processor, traffic: str, slots: int
) -> None:
    speeds = fixed_speeds(machine, traffic, slots)
    speed = per_second(serve(machine, requests(traffic, slots), slots, automatic(machine, slots)))
    assert speed >= 0.97 * max(speeds.values())
    assert speed >= 0.97 * speeds[0]


def test_the_best_fixed_budget_depends_on_the_load() -> None:
    """So that the test above cannot be passed by any one of them."""
    best = [max(speeds, key=speeds.__getitem__) for speeds in (fixed_speeds(GPU, "good", n) for n in (1, 16, 64))]
    assert best[0] > best[1] > best[2]
    assert max(fixed_speeds(GPU, "middling", 64).items(), key=lambda each: each[1])[0] == 0
    assert max(fixed_speeds(PROCESSOR, "sure", 64).items(), key=lambda each: each[1])[0] == 15
    assert max(fixed_speeds(PROCESSOR, "good", 16).items(), key=lambda each: each[1])[0] == 0


@pytest.mark.parametrize(
    ("machine", "quality", "slots"),
    [(GPU, GOOD, 2), (GPU, GOOD, 4), (GPU, GOOD, 16), (PROCESSOR, SURE, 2), (PROCESSOR, SURE, 4)],
    ids=lambda value: type(value).__name__ if isinstance(value, Gpu | Processor) else "",
)
def test_good_requests_after_useless_ones_draft_as_on_a_fresh_engine(
    machine: Machine, quality: Quality, slots: int
) -> None:
    good = [Request(quality, 128, 1000 + i) for i in range(6 * slots)]
    fresh = serve(machine, good, slots, automatic(machine, slots))
    used = automatic(machine, slots)
    serve(machine, [Request(LIAR, 128, i) for i in range(10 * slots)], slots, used)
    assert per_second(serve(machine, good, slots, used)) >= 0.95 * per_second(fresh)


@pytest.mark.parametrize(
    ("machine", "profiled", "traffic", "slots"),
    [
        (PROCESSOR, replace(PROCESSOR, slot_s=0.08e-3, pass_s=1.5e-3), "sure", 16),  # single tokens look too cheap
        (PROCESSOR, replace(PROCESSOR, slot_s=0.08e-3, pass_s=1.5e-3), "good", 4),
        (PROCESSOR, replace(PROCESSOR, block_s=0.35e-3, row_s=0.05e-3), "good", 64),  # drafts do
        (GPU, replace(GPU, flops_s=GPU.flops_s * 1.5), "middling", 64),
        (GPU, replace(GPU, bytes_s=GPU.bytes_s * 1.5), "good", 64),
        (GPU, replace(GPU, flops_s=GPU.flops_s / 1.5), "good", 64),  # drafts look too dear
    ],
)
def test_rounds_correct_a_profile_that_is_wrong(
    machine: Gpu | Processor, profiled: Gpu | Processor, traffic: str, slots: int
) -> None:
    """By a third or more, as other work on the machine or a short context may make it. Without what rounds show, these
    come to between 0.65 and 0.8."""
    speeds = fixed_speeds(machine, traffic, slots)
    speed = per_second(serve(machine, requests(traffic, slots), slots, automatic(profiled, slots)))
    assert speed >= 0.95 * max(speeds.values())


def test_drafting_ends_under_load_and_trees_shrink() -> None:
    drafts, nodes = [], []
    for slots in (4, 16, 64):
        spent = serve(GPU, requests("middling", slots), slots, automatic(GPU, slots))
        drafts.append(spent.drafts / spent.rounds / slots)
        nodes.append(spent.nodes / max(1, spent.drafts))
    assert drafts[0] > 0.95 and drafts[1] > 0.9 and drafts[2] < 0.1
    assert nodes[0] > 2 * nodes[1]
