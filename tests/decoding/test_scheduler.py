"""Continuous batching: what a sequence says never depends on who else is there, on what its slot held before, nor on
whose round failed."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import make_budgets, make_profile
from scripted import ScriptedEngine, completion, finish, generate
from scripted_models import Good, MarkovTarget, Useless

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.core import EngineCore
from ddtree_trt.runtime.decoding.sampling import logprob
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.sequence import Sequence as Completion
from ddtree_trt.runtime.tree import TokenTree

TARGET = MarkovTarget(vocab_size=7, seed=1)
CHUNK = 8


def make(slots: int = 4, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(TARGET, Good(TARGET), max_batch=slots, prefill_chunk=CHUNK, **options)


def prompt(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, size).tolist()


# Sixteen requests that differ in everything; sampled ones are seeded, and drawn drafts use their own generator too.
MIXED: list[tuple[list[int], SamplingParams]] = [
    (prompt(1, 3), SamplingParams(max_tokens=9)),
    (prompt(2, 1), SamplingParams(max_tokens=20, method="ar")),
    (prompt(3, 20), SamplingParams(max_tokens=5, method="dflash")),
    (prompt(4, 8), SamplingParams(max_tokens=1)),
    (prompt(5, 9), SamplingParams(max_tokens=12, tree_budget=1)),
    (prompt(6, 2), SamplingParams(max_tokens=12, tree_budget=40)),
    (prompt(7, 4), SamplingParams(max_tokens=12, frequency_penalty=1, repetition_penalty=1.3)),
    (prompt(8, 30), SamplingParams(max_tokens=3, method="dflash-sample")),
    (prompt(9, 5), SamplingParams(max_tokens=15, temperature=1, seed=1)),
    (prompt(10, 5), SamplingParams(max_tokens=15, temperature=0.7, top_k=3, seed=2, method="dflash-sample")),
    (prompt(11, 16), SamplingParams(max_tokens=7, temperature=1, seed=3, method="ar", logprobs=2)),
    (prompt(1, 3), SamplingParams(max_tokens=9, stop=("ab",))),
    (prompt(12, 17), SamplingParams(max_tokens=8, stop_token_ids=(2,), prompt_logprobs=1)),
    (prompt(13, 6), SamplingParams(max_tokens=10, logit_bias={3: 2.0}, method="dflash")),
    (prompt(14, 7), SamplingParams(max_tokens=11, tree_budget=0)),
    (prompt(15, 40), SamplingParams(max_tokens=60)),  # meets the engine's capacity
]


def said(c: Completion) -> tuple[Any, ...]:
    return c.output, c.output_so_far().text, c.finish_reason, c.stop_reason, c.logprobs, c.prompt_logprobs


def alone(index: int) -> tuple[Any, ...]:
    engine = make()
    c = completion(engine, *MIXED[index])
    finish(Scheduler(engine), [c])
    return said(c)


ALONE = [alone(i) for i in range(len(MIXED))]


def run(scheduler: Scheduler, *completions: Completion) -> None:
    for c in completions:
        scheduler.add(c)
    while scheduler.busy:
        scheduler.step()


def ask(scheduler: Scheduler, tokens: list[int], max_tokens: int = 4, **options: Any) -> Completion:
    c = completion(scheduler.engine, tokens, SamplingParams(max_tokens=max_tokens, **options))
    finish(scheduler, [c])
    return c


def failing(engine: ScriptedEngine, verb: str) -> None:
    def fail(called: str, slots: tuple[int, ...]) -> None:
        if called == verb:
            engine.fail = lambda verb, slots: None
            raise EngineError(f"{verb} failed")

    engine.fail = fail


def test_chunks_of_prompts_are_in_the_pass_of_a_round_and_half_of_it_is_for_short_ones() -> None:
    engine = make()
    engine.mixes = True
    scheduler = Scheduler(engine)
    completions = [
        completion(engine, prompt(i, size), SamplingParams(max_tokens=9)) for i, size in enumerate((2, 20, 10, 2))
    ]
    for c in (completions[:1], completions[1:]):
        for each in c:
            scheduler.add(each)
        engine.calls.clear()
        scheduler.step()
    assert [call.slots for call in engine.calls if call.verb == "verify"] == [(0, 1, 2, 3)]
    assert [engine.length(slot) for slot in (1, 2, 3)] == [CHUNK // 2, CHUNK // 2 - 2 - 1, 2], "a row is the round's"
    assert [len(c.output) for c in completions[1:]] == [0, 0, 1] and len(completions[0].output) > 1
    assert completions[1].metrics.stage_s["prefill"] > 0 and not completions[1].metrics.stage_s["verify"]


@given(
    arrivals=st.lists(st.integers(0, 12), min_size=len(MIXED), max_size=len(MIXED)),
    leaves=st.lists(st.one_of(st.none(), st.integers(0, 25)), min_size=len(MIXED), max_size=len(MIXED)),
    slots=st.integers(1, 6),
    order=st.permutations(range(len(MIXED))),
    mixes=st.booleans(),
)
@settings(max_examples=60)
def test_no_schedule_and_no_cancellation_changes_what_another_says(
    arrivals: list[int], leaves: list[int | None], slots: int, order: list[int], mixes: bool
) -> None:
    engine = make(slots)
    engine.mixes = mixes
    scheduler = Scheduler(engine)
    completions = [completion(engine, *request) for request in MIXED]
    for step in range(10_000):
        for i in order:
            if arrivals[i] == step:
                scheduler.add(completions[i])
            if leaves[i] == step:
                scheduler.cancel(completions[i])
        if step > 26 and not scheduler.busy:
            break
        advanced = scheduler.step()
        assert len({*advanced}) == len(advanced), "callers count those that have ended"
        holders = [c.slot for c in completions if c in scheduler.running or c in scheduler.prefilling]
        assert len(set(holders)) == len(holders) == slots - scheduler.free_slots
    for i, c in enumerate(completions):
        assert c.error is None
        left = leaves[i]
        if c.finish_reason == "abort":
            assert left is not None
            assert c.output == ALONE[i][0][: len(c.output)]
        elif left is None or arrivals[i] <= left:
            assert said(c) == ALONE[i]
    assert scheduler.free_slots == slots


def test_completions_of_a_seed_and_unseeded_requests_are_independent() -> None:
    seeded = generate(make(), [1, 2], SamplingParams(seed=7, temperature=1, max_tokens=30), batch=3)
    unseeded = [generate(make(), [1, 2], SamplingParams(temperature=1, max_tokens=30))[0] for _ in range(10)]
    assert [len({*map(tuple, outputs)}) for outputs in (seeded, unseeded)] == [3, 10]


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "dflash-sample"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(method: str, temperature: float) -> None:
    """Before penalties and temperature, whatever they do to the choice; over chunks of the prompt."""
    asked = prompt(3, 2 * CHUNK + 3)
    wanted: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2, "frequency_penalty": 1.5}
    params = SamplingParams(method=method, temperature=temperature, seed=1, max_tokens=15, **wanted)
    c = completion(make(), asked, params)
    finish(Scheduler(make()), [c])
    whole = [*asked, *c.output]
    assert len(c.prompt_logprobs) == len(asked)
    assert len(c.logprobs) == len(c.output) == 15
    assert c.prompt_logprobs[0] is None
    for i, entry in enumerate([*c.prompt_logprobs, *c.logprobs][1:], 1):
        assert entry == logprob(TARGET.row(whole[:i]), whole[i], 2 if i < len(asked) else 3)
    assert c.output_so_far().cumulative_logprob == pytest.approx(sum(e.logprob for e in c.logprobs))


def test_only_profiling_waits_for_the_engine() -> None:
    """At the end of every stage the engine has a part in and of no other."""
    verbs: dict[bool, list[str]] = {}
    for profile in (False, True):
        engine = make()
        c = completion(engine, [1, 2, 3], SamplingParams(max_tokens=12, tree_budget=6))
        finish(Scheduler(engine, profile=profile), [c])
        verbs[profile] = [call.verb for call in engine.calls]
    assert "synchronize" not in verbs[False]
    assert verbs[True] == [verb for plain in verbs[False] for verb in (plain, "synchronize")]


# Failures


@pytest.mark.parametrize("verb", ["draft", "verify", "commit"])
def test_a_failed_round_ends_those_in_it_and_no_others(verb: str) -> None:
    engine = make(2)
    scheduler = Scheduler(engine)
    completions = [completion(engine, *MIXED[i]) for i in (0, 1, 2, 5)]
    for c in completions:
        scheduler.add(c)
    while len(scheduler.running) < 2:
        scheduler.step()
    failing(engine, verb)
    scheduler.step()
    assert [c.finish_reason for c in completions] == ["error"] * 2 + [None] * 2
    assert [str(c.error) for c in completions[:2]] == [f"{verb} failed"] * 2
    assert scheduler.free_slots == 2
    run(scheduler)
    assert [said(c) for c in completions[2:]] == [ALONE[2], ALONE[5]]
    assert completions[2].metrics.cached_tokens == 0, "a slot in doubt starts empty"


def test_a_failed_prefill_ends_its_sequence_only() -> None:
    engine = make()
    scheduler = Scheduler(engine)
    completions = [completion(engine, *MIXED[i]) for i in (0, 2, 5)]
    scheduler.add(completions[0])
    scheduler.step()
    failing(engine, "prefill")
    run(scheduler, *completions[1:])
    assert (completions[1].finish_reason, str(completions[1].error)) == ("error", "prefill failed")
    assert [said(completions[0]), said(completions[2])] == [ALONE[0], ALONE[5]]


class Breaking(MarkovTarget):
    def __init__(self, bad: int) -> None:
        super().__init__(vocab_size=7, seed=1)
        self.bad = bad

    def logits(self, committed: Sequence[int], tree: TokenTree) -> np.ndarray:
        logits = super().logits(committed, tree)
        logits[tree.token_ids == self.bad] = np.nan
        return logits


@pytest.mark.parametrize("mixes", [False, True])
def test_logits_that_are_not_finite_end_their_sequence_only(mixes: bool) -> None:
    asked = ([1, 2], SamplingParams(max_tokens=6))
    (expected,) = generate(make(), *asked)
    bad = next(t for t in range(7) if t not in [1, 2, *expected])
    target = Breaking(bad)
    engine = ScriptedEngine(target, Useless(7))  # its trees do not come upon the bad token's row by themselves
    engine.mixes = mixes
    sound = completion(engine, *asked)
    biased = completion(engine, [1, 2], SamplingParams(max_tokens=20, logit_bias={bad: 100.0}))
    prefilled = completion(engine, [1, bad], SamplingParams(max_tokens=20))
    run(Scheduler(engine), sound, biased, prefilled)
    assert sound.output == expected
    for c in (biased, prefilled):
        assert isinstance(c.error, EngineError)
        assert "not finite" in str(c.error)


def test_a_drafter_that_says_nan_ends_its_sequence_only() -> None:
    class Broken(Good):
        def block(self, context: Sequence[int], length: int) -> np.ndarray:
            rows = super().block(context, length)
            return rows * np.nan if context[0] == 5 else rows

    engine = ScriptedEngine(TARGET, Broken(TARGET))
    asked: list[tuple[int, dict[str, Any]]] = [
        (5, {}),
        (5, {"method": "dflash-sample", "temperature": 1.0, "seed": 1}),
        (4, {}),
        (5, {"method": "dflash"}),
    ]
    completions = [completion(engine, [start, 1], SamplingParams(max_tokens=9, **options)) for start, options in asked]
    run(Scheduler(engine), *completions)
    assert [type(c.error) for c in completions] == [EngineError, EngineError, type(None), EngineError]


def test_a_watcher_that_fails_ends_its_sequence_only() -> None:
    engine = make()
    completions = [completion(engine, *MIXED[i]) for i in (0, 5)]

    def watch(round_: Any) -> None:
        raise RuntimeError("cannot draw this")

    completions[0].on_round = watch
    run(Scheduler(engine), *completions)
    assert (completions[0].finish_reason, str(completions[0].error)) == ("error", "cannot draw this")
    assert said(completions[1]) == ALONE[5]


def test_a_request_cancelled_before_it_is_added_never_runs() -> None:
    engine = make()
    core = EngineCore(engine, None, make_budgets(make_profile(), 64, 3))  # type: ignore[arg-type]
    asked = Request("r", None, [1, 2], SamplingParams(), [completion(engine, *MIXED[0])])
    core.cancel(asked)
    core.add(asked)
    assert not core.scheduler.busy and not engine.calls


def test_an_interrupted_round_is_not_taken_up_again() -> None:
    engine = make(2)
    scheduler = Scheduler(engine)
    c = completion(engine, *MIXED[5])
    scheduler.add(c)
    scheduler.step()

    def interrupt(verb: str, slots: tuple[int, ...]) -> None:
        if verb == "commit":
            raise KeyboardInterrupt

    engine.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    engine.fail = lambda verb, slots: None
    assert (c.finish_reason, c.error, scheduler.free_slots) == ("abort", None, 2)
    run(scheduler, again := completion(engine, *MIXED[5]))
    assert said(again) == ALONE[5]


# Prefix reuse


@pytest.mark.parametrize("slots", [1, 3])
@given(data=st.data())
@settings(max_examples=40)
def test_a_reused_prefix_says_what_a_fresh_slot_says(slots: int, data: st.DataObject) -> None:
    """Chats of several turns, each turn by any method: `ar` keeps no states for the drafter, the others need them."""
    engine = make(slots)
    scheduler = Scheduler(engine)
    chats = [prompt(seed, 5) for seed in (1, 2)]
    for turn in range(6):
        which = data.draw(st.integers(0, 1))
        method = data.draw(st.sampled_from(["ar", "ddtree", "dflash", "dflash-sample"]))
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 6)), method=method, stop=data.draw(st.sampled_from(["", "c"])) or ()
        )
        asked = chats[which]
        c = completion(engine, asked, params)
        finish(scheduler, [c])
        fresh = completion(make(1), asked, params)
        finish(Scheduler(make(1)), [fresh])
        assert said(c) == said(fresh)
        chats[which] = [*asked, *c.output, turn % 7]
        if len(chats[which]) > 50:
            break


def test_what_a_prompt_finds_in_the_cache() -> None:
    """All but its last token, which is computed for its logits; and what has no states is computed for a drafter."""
    scheduler = Scheduler(make())
    first = ask(scheduler, prompt(1, 10), 8)
    turn = ask(scheduler, [*first.prompt, *first.output, 3, 4])
    assert turn.slot == first.slot and turn.metrics.cached_tokens == 10 + 8 - 1
    plain = ask(scheduler, [*turn.prompt, *turn.output, 1], 6, method="ar")
    assert plain.metrics.cached_tokens == 20 + 4 - 1
    assert ask(scheduler, [*plain.prompt, *plain.output, 2]).metrics.cached_tokens == 20 + 4 - 1


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}], ids=str)
def test_a_request_may_read_nothing_of_the_cache(options: dict[str, Any]) -> None:
    """For its times, or because every row of the prompt is asked for; what it wrote can be reused."""
    scheduler, asked = Scheduler(make(1)), prompt(1, 20)
    found = [ask(scheduler, asked), ask(scheduler, asked, **options), ask(scheduler, asked)]
    assert [c.metrics.cached_tokens for c in found] == [0, 0, 19]
    assert found[0].output == found[1].output == found[2].output


def test_what_all_prompts_begin_with_costs_no_other_chat_its_cache() -> None:
    scheduler, template = Scheduler(make(3)), [6, 6, 6]
    chats = [[*template, *prompt(seed, 12)] for seed in (1, 2, 3)]
    assert {ask(scheduler, chat, 2).slot for chat in chats} == {0, 1, 2}
    for chat in reversed(chats):
        assert ask(scheduler, [*chat, 1], 2).metrics.cached_tokens == len(chat)
    slot = ask(scheduler, chats[0], 2).slot
    assert ask(scheduler, [*template, *prompt(4, 12)], 2).slot != slot, "the slot used last is not the one to give up"


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_who_runs_at_a_reset_goes_on_and_leaves_nothing(steps: int) -> None:
    scheduler, asked = Scheduler(make(1)), prompt(1, 12)
    alone = ask(scheduler, asked, 12)
    running, waiting = (completion(scheduler.engine, asked, SamplingParams(max_tokens=12)) for _ in range(2))
    scheduler.add(running)
    scheduler.add(waiting)
    for _ in range(steps):
        scheduler.step()
    scheduler.reset_prefix_cache()
    run(scheduler)
    assert running.output == waiting.output == alone.output
    found = [c.metrics.cached_tokens for c in (running, waiting, ask(scheduler, asked))]
    assert found == ([0, 11, 11] if steps == 0 else [11, 0, 11])
    scheduler.reset_prefix_cache()
    assert scheduler.engine.length(0) == 0


def test_a_long_prompt_delays_the_others_by_one_chunk_per_round() -> None:
    engine = make()
    scheduler = Scheduler(engine)
    running = [completion(engine, prompt(i, 3), SamplingParams(max_tokens=40, method="ar")) for i in range(2)]
    for c in running:
        scheduler.add(c)
    while len(scheduler.running) < 2:
        scheduler.step()
    engine.calls.clear()
    late = [completion(engine, prompt(9 + i, size), SamplingParams(max_tokens=4)) for i, size in enumerate((30, 17))]
    for c in late:
        scheduler.add(c)
    while any(not c.output for c in late):
        before = [len(c.output) for c in running]
        scheduler.step()
        assert [len(c.output) for c in running] == [n + 1 for n in before]
    passes = [call for call in engine.calls if call.verb in ("prefill", "verify")]
    assert all(call.tokens <= CHUNK for call in passes if call.verb == "prefill")
    assert all("verify" in (a.verb, b.verb) for a, b in pairwise(passes)), "two chunks without a round between them"
    assert Counter(call.verb for call in passes)["prefill"] == 4 + 3
