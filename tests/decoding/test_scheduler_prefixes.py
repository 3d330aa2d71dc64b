"""What the scheduler reuses of a slot's cache, and how a long prompt is prefilled."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import CHUNK, make, prompt, said
from scripted import completion, finish

from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.sequence import Sequence as Completion

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


def test_a_chat_turn_starts_behind_what_its_slot_holds() -> None:
    engine = make()
    scheduler = Scheduler(engine)
    first = completion(engine, prompt(1, 10), SamplingParams(max_tokens=8))
    finish(scheduler, [first])
    asked = [*first.prompt, *first.output, 3, 4]
    second = completion(engine, asked, SamplingParams(max_tokens=4))
    finish(scheduler, [second])
    assert second.slot == first.slot
    assert second.metrics.cached_tokens == len(first.prompt) + len(first.output) - 1


def test_a_request_may_read_nothing_of_the_cache() -> None:
    engine = make(1)
    scheduler = Scheduler(engine)
    first = completion(engine, prompt(1, 10), SamplingParams(max_tokens=8))
    finish(scheduler, [first])
    again = completion(engine, prompt(1, 10), SamplingParams(max_tokens=8, skip_reading_prefix_cache=True))
    finish(scheduler, [again])
    assert again.metrics.cached_tokens == 0 and said(again) == said(first)
    third = completion(engine, prompt(1, 10), SamplingParams(max_tokens=8))
    finish(scheduler, [third])
    assert third.metrics.cached_tokens == 9  # what it wrote can be reused


def test_states_dropped_by_ar_are_made_again_for_a_drafter() -> None:
    engine = make(1)
    scheduler = Scheduler(engine)
    drafted = completion(engine, prompt(1, 10), SamplingParams(max_tokens=4))
    finish(scheduler, [drafted])
    plain = completion(engine, [*drafted.prompt, *drafted.output, 1], SamplingParams(max_tokens=6, method="ar"))
    finish(scheduler, [plain])
    assert plain.metrics.cached_tokens == 13
    third = completion(engine, [*plain.prompt, *plain.output, 2], SamplingParams(max_tokens=6))
    finish(scheduler, [third])
    assert third.metrics.cached_tokens == 13  # what `ar` added has no states


def test_a_prompt_seen_before_needs_its_last_token_only() -> None:
    engine = make()
    scheduler = Scheduler(engine)
    outputs = []
    for _ in range(2):
        c = completion(engine, prompt(1, 20), SamplingParams(max_tokens=4))
        finish(scheduler, [c])
        outputs.append(c.output)
    assert c.metrics.cached_tokens == 19
    assert outputs[0] == outputs[1]
    wanted = completion(engine, prompt(1, 20), SamplingParams(max_tokens=4, prompt_logprobs=0))
    finish(scheduler, [wanted])
    assert wanted.metrics.cached_tokens == 0  # every row of the prompt is asked for


def test_what_all_prompts_begin_with_costs_no_other_chat_its_cache() -> None:
    engine = make(3)
    scheduler = Scheduler(engine)
    template = [6, 6, 6]

    def ask(tokens: list[int]) -> Completion:
        c = completion(engine, tokens, SamplingParams(max_tokens=2))
        finish(scheduler, [c])
        return c

    chats = [[*template, *prompt(seed, 12)] for seed in (1, 2, 3)]
    assert {ask(chat).slot for chat in chats} == {0, 1, 2}
    for chat in reversed(chats):
        assert ask([*chat, 1]).metrics.cached_tokens == len(chat)
    slot = ask(chats[0]).slot
    assert ask([*template, *prompt(4, 12)]).slot != slot, "the slot used last is not the one to give up"


# Chunked prefill


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
