"""The rule of automatic budgets in simulated time: no network runs, and no clock is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import CHAINS, CPU, GPU, SLOW_CPU, make_budgets, make_profile
from scripted import ScriptedEngine, completion, finish
from scripted_models import Good, MarkovTarget

from ddtree_trt import _native
from ddtree_trt.drafters.kind import Drafts
from ddtree_trt.runtime.decoding.budget.costs import ROW, STEP, Costs
from ddtree_trt.runtime.decoding.budget.policy import (
    LOSS,
    PROBES,
    PURSE,
    AutoBudget,
    AutoBudgets,
    Budget,
    Decision,
    FixedBudget,
    RoundPlan,
    SlotInput,
)
from ddtree_trt.runtime.engines.profile import PassTimes, Profile
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import EMPTY, DraftTree, Marginals, build_tree, chain
from workbench.drafts import Text
from workbench.judge import MACHINES, PAST, Machine, play

PROFILES = {"cpu": (CPU, False), "slow-cpu": (SLOW_CPU, False), "gpu": (GPU, False)}
PROFILES |= {name: (profile, True) for name, profile in CHAINS.items()}
MANY = Profile("", PassTimes(1, 64, 0.2, ((1, 1.0), (65, 2.28))), None, PassTimes(8, 64, 0.4, ((1, 1.1), (65, 11.0))))
COSTLY = replace(CPU, far=PassTimes(1, 512, CPU.near.draft_s, CPU.near.verify, CPU.near.verify[0][1] / 100))
ONE_FOR_ALL = Profile("", GPU.near, None, PassTimes(4, 64, 0.22, GPU.near.verify))

LEARN = Costs.learn  # before the fixture of all tests has rounds correct nothing


@pytest.fixture(autouse=True)
def learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "learn", LEARN)


# Answers and drafts of given quality, in simulated time

DEPTH, VOCAB = 15, 16


@dataclass(frozen=True)
class Quality:
    """How often the target takes what the drafter thinks it does (`trust`), and how sure the drafter is (`sharp`, the
    parameter of the Dirichlet its marginals are drawn from: the smaller, the surer)."""

    trust: float
    sharp: float = 0.02


GOOD = Quality(1.0)
LIAR = Quality(0.0)  # sure of itself and always wrong
UNSURE = Quality(0.3, sharp=1.0)  # knows nothing, and knows it
POOR = st.tuples(st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.005, 0.1, 1.0]), st.integers(1, 150))


def text(quality: Quality, tokens: int, seed: int = 0) -> Text:
    """An answer of `tokens` tokens behind the first, whose ids are the drafter's ranks, or VOCAB for none of them."""
    rng = np.random.default_rng(seed)
    places = tokens + DEPTH
    marginals = np.sort(rng.dirichlet(np.full(VOCAB, quality.sharp), places))[:, ::-1]
    log_probs = np.log(np.maximum(marginals, 1e-12)).astype(np.float32)
    ranks = (rng.random((places, 1)) > np.cumsum(marginals, 1)).sum(1)
    said = np.where(rng.random(places) < quality.trust, ranks, VOCAB)[:tokens]
    rows = np.arange(tokens)[:, None] + np.arange(DEPTH)
    ids = np.broadcast_to(np.arange(VOCAB, dtype=np.int32), (DEPTH, VOCAB))
    return Text([0, *said.tolist()], [Marginals(drafted, ids) for drafted in log_probs[rows]])


@dataclass
class Spent:
    seconds: float = 0.0
    rounds: int = 0
    drafts: int = 0
    tokens: int = 0


def decode(answer: Text, budget: Budget, profile: Profile, *, chains: bool = False) -> Spent:
    """One request in the profile's own time. `chains`: the drafter drafts token by token."""
    spent, place, left = Spent(), 0, len(answer.tokens) - 1
    while left:
        plan = RoundPlan.of([budget], [SlotInput(0, left)])
        (most,), tree = plan.ceilings(), EMPTY
        if most:
            drafted = chain(np.zeros(min(most, DEPTH), np.int32)) if chains else answer.tree(place, most)
            (nodes,) = plan.choose([drafted])
            tree = drafted.cut(nodes)
        path = answer.path(place, tree)
        if isinstance(budget, AutoBudget) and plan.decisions[0] is not None:
            budget.observe(plan.decisions[0], tree, path, ends=len(path) == left)
        passes = (most if chains else 1) if most else 0
        spent.seconds += passes * profile.near.draft_s + float(profile.near.verify_s(np.array(1 + len(tree))))
        spent.rounds, spent.drafts, spent.tokens = spent.rounds + 1, spent.drafts + bool(most), spent.tokens + len(path)
        place, left = place + len(path), left - len(path)
    return spent


def in_turn(answers: Sequence[Text], shared: AutoBudgets, profile: Profile, **options: bool) -> list[Spent]:
    return [decode(answer, AutoBudget(shared), profile, **options) for answer in answers]


def shared_budgets(profile: Profile, *, chains: bool = False) -> AutoBudgets:
    return make_budgets(profile, DEPTH if chains else 64, DEPTH, "tokens" if chains else "block")


def random_tree(rng: np.random.Generator, budget: int, depth: int = 7, sharp: float = 0.1) -> DraftTree:
    marginals = np.sort(rng.dirichlet(np.full(VOCAB, sharp), depth))[:, ::-1]
    token_ids = np.tile(np.arange(VOCAB, dtype=np.int32), (depth, 1))
    return build_tree(np.log(np.maximum(marginals, 1e-12)), token_ids, budget)


# What it may cost


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("quality", [LIAR, UNSURE, Quality(0.0, 1.0)])
@pytest.mark.parametrize("tokens", [10, 100, 300, 1000])
def test_what_a_drafter_that_is_never_right_costs(name: str, quality: Quality, tokens: int) -> None:
    """In single-token passes: the bound that the documents state."""
    profile, chains = PROFILES[name]
    answer = text(Quality(0.0, quality.sharp), tokens)
    spent = decode(answer, AutoBudget(shared_budgets(profile, chains=chains)), profile, chains=chains)
    lost = spent.seconds / profile.near.verify[0][1] - tokens
    assert 0 <= lost <= LOSS + PROBES * tokens, "7 % of 100 tokens, 3 % of 300"
    assert spent.drafts >= 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(POOR, max_size=12))
def test_no_request_ends_the_drafting_of_another(history: list[tuple[float, float, int]]) -> None:
    """At given costs good requests draft as on a fresh engine behind up to five poor ones, and soon behind more."""
    good = [text(GOOD, 64, seed) for seed in range(20)]
    fresh = in_turn(good, shared_budgets(CPU), CPU)
    used = shared_budgets(CPU)
    in_turn([text(Quality(trust, sharp), n, seed) for seed, (trust, sharp, n) in enumerate(history)], used, CPU)
    after = in_turn(good, used, CPU)
    rounds = sum(spent.rounds for spent in fresh)
    assert sum(spent.rounds for spent in after) <= rounds / 0.97 + (250 if len(history) > 5 else 0)


def test_requests_lose_less_where_those_before_them_have_lost() -> None:
    shared = shared_budgets(CPU)
    poor = in_turn([text(LIAR, 100, seed) for seed in range(40)], shared, CPU)
    lost = [spent.seconds / CPU.near.verify[0][1] - 100 for spent in poor]
    assert sum(lost[8:]) <= 32 * 100 * 1.2 * PROBES
    good = [text(GOOD, 100, seed) for seed in range(20)]
    behind, fresh = in_turn(good, shared, CPU)[10:], in_turn(good[10:], shared_budgets(CPU), CPU)
    ratio = sum(spent.rounds for spent in behind) / sum(spent.rounds for spent in fresh)
    assert ratio <= 1.02, "one that gains gives the others their drafts back"


def test_requests_side_by_side_learn_from_each_others_drafts() -> None:
    """16 for which drafting loses lose less together than each may alone."""
    machine, poor = MACHINES["smollm2"], [text(UNSURE, 100, seed) for seed in range(16)]
    shared = machine.budgets(16)
    seconds, tokens = play(machine, poor, 16, lambda: AutoBudget(shared))
    lost = seconds / machine.verify_s([1] * 16) * 16 - tokens
    assert lost <= 16 * 0.5 * LOSS


def test_an_output_that_ends_with_its_first_draft_tells_the_others() -> None:
    """Else requests whose answers are a token and the end would draft in vain for ever."""
    shared, tree = shared_budgets(CPU), random_tree(np.random.default_rng(0), 16)
    before, budget = shared.expected.sum(), AutoBudget(shared)
    plan = RoundPlan.of([budget], [SlotInput(100, 100)])
    assert plan.ceilings()[0]
    plan.choose([tree])
    assert plan.decisions[0] is not None
    budget.observe(plan.decisions[0], tree, np.zeros(1, np.int32), ends=True)
    assert shared.expected.sum() < before


def test_new_requests_come_to_expect_what_drafts_brought() -> None:
    """Three of seven tokens are accepted every time, of which the drafter promises one: twice that is believed."""
    shared, tree = shared_budgets(CPU), build_tree(np.full((7, 1), math.log(0.5)), np.zeros((7, 1), np.int32), 7)
    for _ in range(150):
        budget = AutoBudget(shared)
        RoundPlan([budget], [SlotInput(100, 100)]).weigh({0: tree})
        budget.observe(Decision(7, 2.0, 1.5, 1.0), tree, np.arange(4, dtype=np.int32))
    assert shared.expected.sum() == pytest.approx(2.0, rel=0.02)


def test_a_plan_without_drafts_holds_for_its_requests_and_for_a_while() -> None:
    """Costs learn of rounds that were not planned."""
    dear = Profile("", PassTimes(1, 64, 9.0, ((1, 1.0), (65, 2.28))))
    shared = make_budgets(dear, 64, DEPTH)
    budgets = [AutoBudget(shared) for _ in range(5)]

    def rests(those: Sequence[AutoBudget]) -> bool:
        before, plan = shared.plan, RoundPlan.of(those, [SlotInput(100, 200)] * len(those))
        assert plan.ceilings() == [0] * len(those)
        plan.took(0.0, 1.0, [0] * len(those))
        return plan is before

    assert not rests(budgets[:4]) and rests(budgets[:4])
    assert not rests(budgets[:3]) and rests(budgets[:3])
    assert not rests(budgets[1:4])
    held = [rests(budgets[1:4]) for _ in range(10 * STEP)]
    assert held.index(False) == STEP and held.count(False) < 2 * len(held) / STEP
    assert shared.rounds > len(held) - STEP and shared.costs.rounds == ROW / 2 + (5 + len(held)) // STEP


class Caches(Machine):
    """The first rounds without drafts behind one with take twice as long as those that follow."""

    def verify_s(self, tokens: Sequence[int]) -> float:
        singles = 0 if max(tokens) > 1 else vars(self).get("singles", 0) + 1
        vars(self)["singles"] = singles
        return super().verify_s(tokens) * (2.0 if 0 < singles <= ROW / 2 else 1.0)


def test_what_single_tokens_take_is_told_by_the_later_half_of_a_row() -> None:
    machine, answers = MACHINES["tiny"], [text(GOOD, 100, seed) for seed in range(12)]
    shared, single_s = machine.budgets(1), machine.verify_s([1])
    for _ in range(3):
        play(Caches(**vars(machine)), answers, 1, lambda: AutoBudget(shared))
    assert shared.costs.verify_s(PAST, 1)[0] == pytest.approx(single_s, rel=0.1)


@pytest.mark.parametrize(("load", "in_a_row", "told"), [(1.5, 1, False), (1.5, 2, True), (0.7, 1, True)])
def test_the_first_draft_behind_others_tells_only_what_it_takes_at_most(load: float, in_a_row: int, told: bool) -> None:
    costs = Costs(CPU, 64)
    for _ in range(8):
        costs.learn(0, 1, [3], costs.draft_s(0, 1), costs.verify_s(0, 1)[3])
    for _ in range(32):
        costs.learn(0, 0, [0], 0.0, costs.verify_s(0, 1)[0])
        for _ in range(in_a_row):
            costs.learn(0, 1, [3], CPU.near.draft_s * load, costs.verify_s(0, 1)[3])
    assert (costs.draft_s(0, 1) == pytest.approx(CPU.near.draft_s, rel=0.05)) != told


@pytest.mark.parametrize(("left", "unseen", "drafts"), [(10, 1000, False), (10, 40, True), (100, 1000, True)])
def test_a_draft_must_repay_what_its_drafter_has_still_to_take_in(left: int, unseen: int, drafts: bool) -> None:
    plan = RoundPlan.of([AutoBudget(shared_budgets(COSTLY))], [SlotInput(1000, left, unseen=unseen)])
    assert (plan.ceilings()[0] > 0) == drafts, "a thousand tokens cost ten passes"


def test_what_a_probe_takes_in_lets_the_next_one_wait_and_is_not_held_against_its_drafts() -> None:
    decisions = []
    for unseen in (0, 300):
        budget = AutoBudget(shared := shared_budgets(COSTLY))
        budget.loss, shared.purse = LOSS, PURSE
        plan = RoundPlan.of([budget], [SlotInput(1000, 500, unseen=unseen)])
        plan.choose([random_tree(np.random.default_rng(0), n) for n in plan.ceilings()])
        assert shared.purse == pytest.approx(PURSE - unseen / 100)
        decisions += plan.decisions
    assert decisions[0] == decisions[1] and decisions[0] is not None and decisions[0].probe


def test_probes_of_a_request_are_further_and_further_apart() -> None:
    """However many are afforded: those made at once would all meet the same bad part of a text."""
    shared = shared_budgets(GPU)
    budget, shared.purse = AutoBudget(shared), PURSE
    budget.loss = LOSS
    assert decode(text(LIAR, 150), budget, GPU).drafts == pytest.approx(math.sqrt(2 * 150), abs=2)


def test_slots_do_not_draft_where_those_that_would_have_shared_the_pass_do_not_repay_what_they_take_in() -> None:
    """Eight would gain together; seven of them have too much to take in, and one alone cannot."""
    verify = ((1, 1.0), (65, 1.6))
    near, many = PassTimes(1, 64, 1.0, verify), PassTimes(8, 64, 1.5, verify)
    shared = make_budgets(Profile("", near, replace(near, context=512, context_s=0.01), many), 64, 7)
    shared.expected *= 1.65 / 7
    inputs = [SlotInput(300, 200), *[SlotInput(1500, 2000, unseen=1500)] * 7]
    assert RoundPlan.of([AutoBudget(shared) for _ in inputs], inputs).ceilings() == [0] * 8
    inputs = [SlotInput(300, 200), *[SlotInput(1500, 2000)] * 7]
    assert all(RoundPlan.of([AutoBudget(shared) for _ in inputs], inputs).ceilings())


def test_rounds_that_costs_are_not_of_teach_nothing() -> None:
    """Trees beyond the largest, as of a fixed budget beside automatic ones; and a draft without a tree tells nothing of
    rounds without drafts."""
    near = PassTimes(1, 64, 0.2, ((1, 1.0), (17, 1.2), (65, 4.0)))
    costs = Costs(profile := Profile("", near), 16)
    costs.learn(0, 0, [64, 16], 0.0, 9.0)
    assert costs.corrected == profile
    for nodes in [0, 3, 16] + [15] * (ROW - 3):
        assert costs.due > 0
        costs.learn(0, 1, [nodes], near.draft_s, float(near.verify_s(np.array(1 + nodes))))
    assert costs.due == 0
    assert all(c.ratio == pytest.approx(1.0) for c in costs.corrected.corrections), "all took what the profile says"


def test_drafting_resumes_where_it_pays_again() -> None:
    """Wherever that is: a single text may meet a probe a token too late."""
    good = text(GOOD, 300, 1)
    alone_s, ratios = decode(good, AutoBudget(shared_budgets(CPU)), CPU).seconds, []
    for tokens in range(50, 275, 25):
        bad = text(LIAR, tokens)
        mixed = Text([*bad.tokens, *good.tokens[1:]], [*bad.drafts, *good.drafts])
        spent = decode(mixed, AutoBudget(shared_budgets(CPU)), CPU)
        ratios.append((spent.seconds - tokens) / alone_s)
    assert np.mean(ratios) < 1.6


def test_a_pass_takes_what_its_rows_take_unless_it_is_padded() -> None:
    """Two of eight slots with trees add a fourth of what eight do."""
    for buckets, share in ((None, 0.25), ((1, 17, 65), 1.0)):
        costs = Costs(MANY, 64, buckets)
        added = [costs.verify_s(0, 8, trees)[1:] - costs.verify_s(0, 8)[0] for trees in (2, 8)]
        assert added[0] == pytest.approx(share * added[1])


def test_other_work_slows_rounds_that_are_not_made_too() -> None:
    """What single tokens cost beside trees stays as it was seen when other work begins and when it ends."""
    costs = Costs(MANY, 64)
    drafted_s, single_s, tree_s = (float(x) for x in (costs.draft_s(0, 8), *costs.verify_s(0, 8)[[0, 11]]))

    def rounds(count: int, nodes: int, load: float) -> None:
        for _ in range(count):
            costs.learn(0, 8 * (nodes > 0), [nodes] * 8, drafted_s * load, (tree_s if nodes else single_s) * load)

    rounds(8, 0, 1.0)
    for load in (1.0, 5.0, 1.0, 0.2):
        rounds(96, 11, load)
        assert costs.verify_s(0, 8)[11] == pytest.approx(tree_s * load, rel=0.05)
        assert costs.verify_s(0, 8)[0] == pytest.approx(single_s * load, rel=0.25)
    rounds(-costs.rounds % (2 * ROW), 11, load)  # costs follow every so many rounds
    saved = Costs(costs.corrected, 64)
    np.testing.assert_allclose(saved.verify_s(0, 8), costs.verify_s(0, 8))


def seconds_of(machine: Machine, answers: list[Text], slots: int, wrong: float = 1.0, *, late: bool = False) -> float:
    """Of automatic budgets that begin with a profile wrong by that factor."""
    shared = machine.budgets(slots, wrong)
    return play(machine, answers, slots, lambda: AutoBudget(shared), late=late)[0]


@pytest.mark.parametrize("quality", [GOOD, Quality(0.8, 0.05), UNSURE, LIAR])
@pytest.mark.parametrize(("name", "slots"), [("tiny", 1), ("h100", 1), ("h100", 16), ("torch", 4)])
def test_it_is_about_as_fast_as_the_best_fixed_budget(name: str, slots: int, quality: Quality) -> None:
    """The worst of these is a drafter that knows nothing, and knows it."""
    machine = MACHINES[name]
    answers = [text(quality, 100 + 10 * (seed % 10), seed) for seed in range(max(12, 2 * slots))]
    rivals = [play(machine, answers, slots, partial(FixedBudget, nodes))[0] for nodes in (0, 1, 3, 7, 15, 31)]
    assert seconds_of(machine, answers, slots) <= min(rivals) / 0.9


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("name", ["tiny", "h100"])
def test_rounds_correct_a_profile_that_is_wrong(name: str, wrong: float) -> None:
    answers = [text(Quality(0.98, 0.02), 120, seed) for seed in range(12)]
    assert seconds_of(MACHINES[name], answers, 1, wrong) <= 1.06 * seconds_of(MACHINES[name], answers, 1)


@pytest.mark.parametrize(("reopened", "within"), [(False, 1.45), (True, 1.25)])
def test_what_a_busy_machine_taught_is_soon_unlearnt(reopened: bool, within: float) -> None:
    """By the process that saw it, and by the next: of so many rounds that a few new ones hardly count."""
    machine, answers = MACHINES["tiny"], [text(Quality(0.98, 0.02), 120, seed) for seed in range(12)]
    shared = machine.budgets(1)
    for nodes in (3, 4, 6, 8, 12, 16, 0) * 200:
        load = 2.5 if nodes else 1.0
        shared.costs.learn(0, min(nodes, 1), [nodes], load * machine.draft_s(1), load * machine.verify_s([1 + nodes]))
    if reopened:
        shared.costs = Costs(shared.costs.corrected, shared.max_nodes)
    assert play(machine, answers, 1, lambda: AutoBudget(shared))[0] <= within * seconds_of(machine, answers, 1)


@pytest.mark.parametrize("slots", [1, 8])
def test_a_round_late_it_chooses_nearly_as_well(slots: int) -> None:
    """On a device, where a round is decided before the one before it is read."""
    texts = [text(Quality(0.9, 0.05), 150, seed) for seed in range(8)]
    assert seconds_of(MACHINES["h100"], texts, slots, late=True) <= 1.05 * seconds_of(MACHINES["h100"], texts, slots)


# The size


def chosen(shared: AutoBudgets, trees: list[DraftTree], left: int = 99) -> tuple[RoundPlan, list[int]]:
    plan = RoundPlan.of([AutoBudget(shared) for _ in trees], [SlotInput(0, left)] * len(trees))
    plan.ceilings()
    return plan, plan.choose(list(trees))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.02, 0.1, 0.5]))
def test_the_size_is_the_best_of_all(seed: int, slots: int, sharp: float) -> None:
    """Against every size: the most expected tokens per second, rows summed over the slots of the pass."""
    rng, shared = np.random.default_rng(seed), make_budgets(MANY if slots > 1 else GPU)
    trees = [random_tree(rng, 40, sharp=sharp) for _ in range(slots)]
    plan, nodes = chosen(shared, trees)
    verify_s, draft_s = shared.costs.verify_s(0, slots), shared.costs.draft_s(0, slots)
    accepted = [np.exp(tree.log_weights) for tree in trees]
    rates = [(slots + sum(float(each[:n].sum()) for each in accepted)) / (draft_s + verify_s[n]) for n in range(1, 41)]
    assert rates[max(nodes) - 1] == pytest.approx(max(rates))
    assert len(set(nodes)) == 1, "a row of the pass is paid for all slots"
    decisions = [decision for decision in plan.decisions if decision is not None]
    extra_s = sum(decision.expected_s - decision.single_token_s for decision in decisions)
    assert extra_s == pytest.approx(draft_s + verify_s[max(nodes)] - verify_s[0]), "the shares add up to the round"


@pytest.mark.parametrize("proposes", ["block", "tokens"])
def test_nothing_is_drafted_for_tokens_that_cannot_come(proposes: str) -> None:
    profile, chains = (CPU, False) if proposes == "block" else (CHAINS["small"], True)
    near = profile.near
    for left in range(1, 20):
        shared = shared_budgets(profile, chains=chains)
        plan = RoundPlan.of([AutoBudget(shared)], [SlotInput(0, left)])
        (most,) = plan.ceilings()
        costs = [(n if chains else 1) * near.draft_s + float(near.verify_s(np.array(1 + n))) for n in range(1, 17)]
        pays = any(1 + min(n, left - 1) > cost for n, cost in enumerate(costs, 1))
        assert bool(most) is pays
        if most:
            plan.choose([chain(np.zeros(min(most, DEPTH), np.int32))])
            assert plan.decisions[0] is not None and plan.decisions[0].expected_tokens <= left


def test_rows_that_are_padded_anyhow_are_used() -> None:
    shared = AutoBudgets(Costs(GPU, 64, buckets=[1, 8, 32, 65]), 64, DEPTH)
    _, (nodes,) = chosen(shared, [random_tree(np.random.default_rng(0), 64)])
    assert nodes in (7, 31, 64)


def test_a_fixed_budget_ends_no_drafting_beside_it() -> None:
    """A round without drafts is due now and then, and cannot be had while another request drafts anyhow."""
    budget, drafts = AutoBudget(make_budgets(MANY)), 0
    tree = chain(np.zeros(3, np.int32))
    for _ in range(100):
        plan = RoundPlan.of([FixedBudget(2), budget], [SlotInput(0, 99)] * 2)
        nodes = plan.ceilings()
        drafts += nodes[1] > 0
        nodes = plan.choose([tree, tree if nodes[1] else None])
        plan.took(0.3, 1.2, nodes)
        assert nodes[0] == 2 and plan.decisions[0] is None and plan.decisions[1] is not None
        budget.observe(plan.decisions[1], tree.cut(nodes[1]), np.arange(1 + min(nodes[1], 3), dtype=np.int32))
    assert drafts == 100


def test_a_draft_that_a_constraint_empties_is_paid() -> None:
    budget, drafts = AutoBudget(make_budgets(CPU)), 0
    for _ in range(300):
        plan = RoundPlan.of([budget], [SlotInput(0, 99)])
        (most,) = plan.ceilings()
        drafts += most > 0
        plan.choose([EMPTY if most else None])
        assert plan.decisions[0] is not None
        budget.observe(plan.decisions[0], EMPTY, np.array([0], np.int32))
    assert 1 <= drafts <= LOSS + PROBES * 300


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["block", "tokens", "levels"]))
def test_rounds_of_any_costs_and_ends_are_planned(seed: int, proposes: Drafts) -> None:
    rng = np.random.default_rng(seed)
    shared = make_budgets(MANY, 15, 15, proposes)
    budgets = [AutoBudget(shared) for _ in range(7)]
    for _ in range(30):
        plan = RoundPlan.of(budgets, [SlotInput(0, int(rng.choice([1, 2, 3, 100]))) for _ in budgets])
        most = plan.ceilings()
        trees = [chain(np.zeros(min(n, 5), np.int32)) if n else None for n in most]
        nodes = plan.choose(trees)
        plan.took(float(rng.uniform(0.01, 9)) * any(most), float(rng.uniform(0.1, 20)), nodes)
        for budget, tree, n, decision in zip(budgets, trees, nodes, plan.decisions, strict=True):
            assert decision is not None and decision.expected_s >= 0.999 * decision.single_token_s
            path = np.arange(1 + int(rng.integers(0, 1 + min(n, 5))), dtype=np.int32)
            budget.observe(decision, (tree or EMPTY).cut(n), path)


@pytest.mark.parametrize("name", CHAINS)
def test_the_length_of_a_chain_follows_what_is_accepted(name: str) -> None:
    profile = CHAINS[name]
    shared = shared_budgets(profile, chains=True)
    good = decode(text(Quality(1.0, 0.001), 300), AutoBudget(shared), profile, chains=True)
    weak = decode(text(Quality(0.6, 0.001), 300), AutoBudget(shared), profile, chains=True)
    assert good.tokens / good.rounds > 1.5 * weak.tokens / weak.rounds


@pytest.mark.parametrize(("level_s", "right", "deep"), [(0.05, True, 6), (1.2, True, 0), (0.05, False, 0)])
def test_levels_follow_what_is_accepted_and_what_they_cost(level_s: float, right: bool, deep: int) -> None:
    budget, levels = AutoBudget(make_budgets(make_profile(level_s, 0.01, 0.02), 64, 6, "levels")), []
    for _ in range(200):
        plan = RoundPlan.of([budget], [SlotInput(0, 99)])
        (most,) = plan.ceilings()
        levels.append((budget.levels or 0) if most else 0)
        tree = random_tree(np.random.default_rng(0), 20, depth=budget.levels or 1) if most else EMPTY
        cut = tree.cut(plan.choose([tree if most else None])[0])
        path = [0]
        while right and (children := np.flatnonzero(cut.parents == path[-1])).size:
            path.append(int(children[0]))
        assert plan.decisions[0] is not None
        budget.observe(plan.decisions[0], cut, np.array(path, np.int32))
    assert np.median(levels) == deep


# Calibration


def test_calibrated_ratios_against_a_plain_statement() -> None:
    rng = np.random.default_rng(3)
    evidence, observed, predicted, keep = np.zeros((2, 7)), np.zeros(7), np.zeros(7), 1 - 1 / 32
    for _ in range(60):
        tree = random_tree(rng, 20)
        path = [0]
        while (children := np.flatnonzero(tree.parents == path[-1])).size and rng.random() < 0.7:
            path.append(int(rng.choice(children)))
        _native.learn(evidence, tree.parents, tree.log_weights, np.array(path, np.int32), keep)
        weights = np.concatenate(([0.0], tree.log_weights))
        observed, predicted = observed * keep, predicted * keep
        for depth, node in enumerate(path[:7]):
            mass = sum(math.exp(weights[c] - weights[node]) for c in np.flatnonzero(tree.parents == node))
            if mass > 0:
                predicted[depth] += mass
                observed[depth] += depth + 1 < len(path)
    above, expected = 1.0, []
    for seen, said in zip(observed, predicted, strict=True):
        above = min((4 * above + seen) / (4 + said), 2.0)
        expected.append(above)
    assert _native.calibrated_ratios(evidence, 4.0, 2.0) == pytest.approx(expected)


# The loop


def test_the_loop_is_lossless_and_times_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the scripted engine, on a machine where every pass takes twice as long as the profile says."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    outputs = {}
    for automatic in (False, True):
        engine = ScriptedEngine(target := MarkovTarget(), Good(target))
        if automatic:

            def spend(verb: str, slots: tuple[int, ...], engine: ScriptedEngine = engine) -> None:
                clock[0] += {"draft": 0.44, "verify": 2 + 0.008 * (engine.calls[-1].tokens - 1)}.get(verb, 0.0)

            engine.fail = spend
        shared = AutoBudgets(Costs(ONE_FOR_ALL, 64), 64, 3)
        completions = [completion(engine, [1 + i], SamplingParams(method="ddtree", max_tokens=90)) for i in range(3)]
        for each in completions:
            each.budget = AutoBudget(shared) if automatic else FixedBudget(0)
        finish(Scheduler(engine), completions)
        outputs[automatic] = [each.output for each in completions]
        if automatic:
            assert shared.costs.draft_s(0, 3) == pytest.approx(0.44, rel=0.1)
            assert shared.costs.verify_s(0, 3)[8] == pytest.approx(2.064, rel=0.1)
    assert outputs[True] == outputs[False]
