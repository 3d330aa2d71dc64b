"""Automatic budgets near an answer's end: nothing is drafted for that no token can come of, and every round is paid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulated import CHAINS, CPU, GOOD, MACHINES, Machine, Request, Spent

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.runtime import core
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudgets
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.tree import EMPTY, chain


@pytest.mark.parametrize("chains", [False, True])
def test_a_draft_that_the_end_leaves_no_room_for_is_not_made(chains: bool) -> None:
    """With one token left nothing can be gained; with `left`, no more than `left` tokens are expected of a round."""
    shared = AutoBudgets(CHAINS["small"] if chains else CPU, 16, 15, chains=chains)
    for left in range(1, 20):
        auto, costs = shared.for_sequence(), shared.costs.at(0)
        pays = [n for n in range(1, 17) if (1 + min(n, left - 1)) * costs.single_s > costs.round_s(n)]
        most = auto.ceiling(0, left)
        assert bool(most) is bool(pays)
        if most:
            auto.choose(chain(np.zeros(min(most, 15), np.int32)), 0)
            assert auto.last is not None and auto.last.expected_tokens <= left


def test_answers_too_short_to_gain_take_no_longer_than_single_tokens() -> None:
    machine = Machine(CPU)
    for tokens in (1, 2):  # where a draft costs a pass, three tokens are the fewest that pay
        assert machine.run([Request(GOOD, tokens, seed) for seed in range(9)]) == [Spent(tokens, tokens, tokens, 0)] * 9


def test_two_tokens_are_never_drafted_for(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes from the prompt's pass, and a draft for the last one alone cannot pay."""
    monkeypatch.setattr(core, "load_or_measure", lambda *_: MACHINES["gpu"])
    for tokens, drafted in ((2, [0]), (40, None)):
        rounds: list[Round] = []
        with LLM(tiny_engine) as llm:
            for _ in llm.stream(
                "One and one", SamplingParams(max_tokens=tokens, ignore_eos=True), on_round=rounds.append
            ):
                pass
        sizes = [len(r.tree) for r in rounds]
        assert sizes == drafted if drafted else max(sizes) > 0


def test_a_round_that_ends_its_request_is_paid_and_teaches_nothing() -> None:
    """The engine's savings for probes must not stay as they were where a probe is the answer's last round."""
    shared = AutoBudgets(CPU, 64, 15)
    auto = shared.for_sequence()
    tree = chain(np.zeros(2, np.int32))
    auto.ceiling(0, 99)
    auto.observe(tree.cut(auto.choose(tree, 0)), np.array([0], np.int32), 7)
    while not auto.ceiling(1, 99):
        auto.observe(EMPTY, np.array([0], np.int32), 7)
    saved, known = shared.savings.seconds, auto._calibration.ratios()
    nodes = auto.choose(tree, 1)
    auto.observe(tree.cut(nodes), np.array([0, 1], np.int32), 0, ends=True)
    costs = shared.costs.at(1)
    assert shared.savings.seconds == pytest.approx(saved - (costs.round_s(nodes) - costs.single_s))
    np.testing.assert_array_equal(auto._calibration.ratios(), known)
