"""The round on the device, run on the CPU: token for token what the host-built round gives."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kernel_reference as plugin_reference
import numpy as np
import pytest
import torch
from drafts import marginals
from engine_builds import CHATS, PACKAGED, build_torch_engine
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import AHEAD, DraftRequest, RoundRequest, RoundResult, VerifyRequest
from ddtree_trt.runtime.engines.torch.device_round import HostOps
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import token_chain


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    codec = TextCodec(directory, {})
    return [codec.encode(chat) for chat in CHATS[3::17][:3]]


def rounds_of(engine: TorchEngine) -> TorchRounds:
    assert engine.rounds is not None
    return engine.rounds


def ask(bonus: Sequence[int], **request: Any) -> list[RoundRequest]:
    """Of slots 0, 1, …"""
    return [RoundRequest(slot, token, **{"budget": 16, **request}) for slot, token in enumerate(bonus)]


def one_round(engine: TorchEngine, requests: list[RoundRequest]) -> list[RoundResult]:
    rounds_of(engine).launch(requests)
    return rounds_of(engine).read().results


def decode(
    engine: TorchEngine, bonus: Sequence[int], tokens: int, *, ahead: int = AHEAD, **request: Any
) -> tuple[list[Any], list[Any]]:
    """Rounds of slots 0, 1, … until one of them has so many tokens: the tokens of each, and how many by round. Some are
    still under way."""
    rounds, requests = rounds_of(engine), ask(bonus, **request)
    found: list[list[int]] = [[] for _ in bonus]
    lengths: list[list[int]] = [[] for _ in bonus]
    while max(map(len, found)) < tokens:
        while rounds.ahead < ahead and all(n >= 0 for n in rounds.launchable(range(len(bonus)))):
            rounds.launch(requests)
        for result in rounds.read().results:
            slot, tokens_ = result.request.slot, result.tokens
            requests[slot] = requests[slot]._replace(bonus_token=tokens_[-1])
            found[slot] += tokens_
            lengths[slot].append(len(tokens_))
    return found, lengths


def prefill(engine: TorchEngine, prompts: list[list[int]]) -> list[int]:
    """Put each prompt into a slot; their first tokens."""
    bonus = []
    for slot, prompt in enumerate(prompts):
        engine.truncate(slot, 0)
        verdict = engine.prefill(slot, np.array(prompt, np.int64), rows="last", taps=True)
        bonus.append(int(verdict.choices[0]))
    return bonus


def begins_with(longer: list[Any], shorter: list[Any]) -> bool:
    return longer[: len(shorter)] == shorter


@pytest.mark.parametrize(("ahead", "budget"), [(1, 3), (2, 16), (3, 64)])
def test_the_engine_goes_on_where_rounds_stopped(
    engine: TorchEngine, prompts: list[Any], plain: list[list[int]], ahead: int, budget: int
) -> None:
    """Rounds launched in vain leave no trace: what comes after a slot has left, also in the middle of a round's tokens,
    is what one long run says. Another slot, and rounds of two slots, in between."""
    bonus = prefill(engine, prompts[:2])
    said, other = [bonus[0]], [bonus[1]]
    for kept in (1, 9, 2, 12):
        tokens, _ = decode(engine, said[-1:], kept, ahead=ahead, budget=budget)
        said += tokens[0][:kept]
        engine.truncate(0, len(prompts[0]) + len(said) - 1)
        tokens, _ = decode(engine, [said[-1], other[-1]], 1, ahead=ahead, budget=budget)
        said += tokens[0]
        other += tokens[1]
        for slot in (0, 1):
            rounds_of(engine).leave(slot)
    assert begins_with(plain[0], said) and begins_with(plain[1], other)


def test_slots_join_and_leave_as_they_like(engine: TorchEngine, prompts: list[Any], plain: list[list[int]]) -> None:
    """Whatever slots do meanwhile, each says what it says alone, with every kind of tree."""
    rounds, rng = rounds_of(engine), np.random.default_rng(3)
    prefill(engine, prompts)
    said = [[text[0]] for text in plain]
    kinds: list[dict[str, Any]] = [{"budget": 0}, {"budget": 15, "chain": True}, {"budget": 16}, {"budget": 40}]
    for _ in range(80):
        going = [slot for slot in range(3) if rng.random() < 0.7]
        if going and rounds.ahead < AHEAD:
            rounds.launch([RoundRequest(slot, said[slot][-1], **kinds[rng.integers(4)]) for slot in going])
        if rounds.ahead == AHEAD or (rounds.ahead and rng.random() < 0.3):
            for result in rounds.read().results:
                said[result.request.slot] += result.tokens
        slot = int(rng.integers(3))
        done = len(said[slot]) > 60
        if done or rng.random() < 0.2:
            least = 1 if done else max(len(said[slot]) - 4, 1)
            said[slot] = said[slot][: int(rng.integers(least, len(said[slot]) + 1))]
            engine.truncate(slot, len(prompts[slot]) + len(said[slot]) - 1)
        assert all(begins_with(text, found) for text, found in zip(plain, said, strict=True))


@pytest.fixture(scope="module")
def plain(directory: Path, prompts: list[Any]) -> list[list[int]]:
    """What the target says by itself."""
    with LLM(directory) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=120, ignore_eos=True, method="ar"))
        return [output.outputs[0].token_ids for output in outputs]


def test_slots_of_one_round_have_budgets_of_their_own(engine: TorchEngine, prompts: list[Any]) -> None:
    """Trees of different sizes share a pass; a slot's rounds are those it has alone."""
    alone, budgets = [], (3, 40, 16)
    for n, budget in enumerate(budgets):
        bonus = prefill(engine, prompts[n : n + 1])
        alone += one_round(engine, ask(bonus, budget=budget))
        assert alone[-1].nodes == budget
    requests = [r._replace(budget=budget) for r, budget in zip(ask(prefill(engine, prompts)), budgets, strict=True)]
    together = {result.request.slot: result for result in one_round(engine, requests)}
    assert [together[slot].tokens for slot in range(3)] == [result.tokens for result in alone]
    assert [together[slot].nodes for slot in range(3)] == list(budgets)


def test_trees_too_large_for_one_pass_have_several(engine: TorchEngine, prompts: list[Any]) -> None:
    """Slots with the largest trees are together; no slot that has left pads a pass of others."""
    rounds, bonus = rounds_of(engine), prefill(engine, prompts)
    alone = [result.tokens for result in one_round(engine, ask(bonus, budget=256))]
    assert len(alone) == 3
    for slot, prompt in enumerate(prompts):
        engine.truncate(slot, len(prompt))
    requests = [r._replace(budget=budget) for r, budget in zip(ask(bonus), (256, 3, 256), strict=True)]
    rounds.launch(requests)
    assert [[r.slot for r in each.requests] for each in rounds._launched[0]] == [[0, 2], [1]]
    found = {result.request.slot: result.tokens for result in rounds.read().results}
    assert found[0] == alone[0] and found[2] == alone[1 if len(alone) < 3 else 2]


def test_what_was_drafted_comes_with_the_result(engine: TorchEngine, prompts: list[Any]) -> None:
    """The tree is that of a draft by stages, and what lies beyond it the beginning of a larger one."""
    bonus, rounds = prefill(engine, prompts[:2]), rounds_of(engine)
    drafts = engine.draft([DraftRequest(slot, token, 64, 64) for slot, token in enumerate(bonus)])
    for slot, prompt in enumerate(prompts[:2]):
        engine.truncate(slot, len(prompt))
    for result, draft in zip(one_round(engine, ask(bonus, budget=15, looks=True)), drafts, strict=True):
        assert result.drafted is not None
        tree, more, path = result.drafted
        larger = draft.candidates.best_first(32)
        for found, wanted in ((tree, larger.cut(15)), (more, larger)):
            np.testing.assert_allclose(found.log_weights, wanted.log_weights, rtol=1e-5)
            assert found.depths.tolist() == wanted.depths.tolist()
        assert tree.token_ids.tolist() == larger.cut(15).token_ids.tolist()
        assert tree.parents.tolist() == larger.cut(15).parents.tolist()
        assert result.tokens[:-1] == tree.token_ids[path[1:] - 1].tolist()
    rounds.launch(ask([r.tokens[-1] for r in [result]], budget=0, looks=True))
    assert rounds.read().results[0].drafted is None


def test_states_wait_while_there_is_room(engine: TorchEngine, prompts: list[Any], plain: list[list[int]]) -> None:
    """Rounds without a draft leave theirs to the next one; those of many are taken in by a pass without a block. Then
    drafts are what they are behind the same tokens, prefilled."""
    block, rounds = engine.manifest.drafting.block_size, rounds_of(engine)
    assert block is not None
    (bonus,) = prefill(engine, prompts[:1])
    length = 0
    for budgets in ([0] * (2 * block + 3), [16, 0, 0, 16], [16, 3, 0]):
        for budget in budgets:
            rounds.launch(ask([bonus], budget=budget))
        for _ in budgets:
            (result,) = rounds.read().results
            length += len(result.tokens)
        bonus = result.tokens[-1]
        assert engine.drafter.context_length(0) == engine.length(0) == len(prompts[0]) + length
        assert plain[0][length] == bonus
    found = marginals(engine.draft([DraftRequest(0, bonus, 16, 15)])[0])
    prefill(engine, [[*prompts[0], *plain[0][:length]]])
    wanted = marginals(engine.draft([DraftRequest(0, bonus, 16, 15)])[0])
    assert found.token_ids[:, 0].tolist() == wanted.token_ids[:, 0].tolist()
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, atol=1e-3)


def test_passes_have_few_sizes_of_which_all_are_captured_at_the_start(
    engine: TorchEngine, prompts: list[Any], replayed: Counter[Any], plain: list[list[int]]
) -> None:
    """As graphs would run them: no round has another, whatever its slots and trees, and none is run on tensors that
    come and go."""
    rounds = rounds_of(engine)
    rounds.warm_up()
    captured = set(replayed)
    for slots, looks in ((1, False), (2, True), (3, False)):
        for request in ({"budget": 0}, {"budget": 15, "chain": True}, *({"budget": n} for n in (1, 5, 30, 200))):
            bonus = prefill(engine, prompts[:slots])
            found, _ = decode(engine, bonus, 12, looks=looks, **request)
            assert all(begins_with(text[1:], said) for text, said in zip(plain, found, strict=False))
    assert {key for key in replayed if key[0].startswith("round")} == captured
    assert len(captured) <= 33 + 31


def test_rounds_go_on_to_the_slots_end(engine: TorchEngine, prompts: list[Any]) -> None:
    """The last ones are not launched ahead; then there is no room."""
    (bonus,) = prefill(engine, prompts[:1])
    rounds = rounds_of(engine)
    with pytest.raises(EngineError, match="cache rows, 257 more do not fit"):
        while True:
            decode(engine, [bonus], 1)
            if rounds.launchable([0]) == [0]:
                rounds.leave(0)
                rounds.launch(ask([bonus]))
    assert engine.limits.max_seq_len <= engine.length(0) <= engine.target.cache.rows


def test_closing_gives_the_memory_back_at_once(engine: TorchEngine, prompts: list[Any]) -> None:
    """Its rounds hold nothing that only a garbage collection would free."""
    (bonus,) = prefill(engine, prompts[:1])
    decode(engine, [bonus], 4)
    held = [weakref.ref(t) for t in (engine.target.cache.slab, engine.target.logits, engine.target.network.embedding)]
    gc.disable()
    try:
        engine.close()
        assert [h() for h in held] == [None] * len(held)
    finally:
        gc.enable()


OTHER_WORK: dict[str, Callable[[TorchEngine], Any]] = {
    "truncate": lambda engine: engine.truncate(0, engine.length(0)),
    "prefill": lambda engine: engine.prefill(0, np.array([9]), rows="none", taps=True),
    "draft": lambda engine: engine.draft([DraftRequest(0, 9, 4, 4)]),
    "verify": lambda engine: engine.verify([VerifyRequest(0, token_chain(np.array([9, 8])))]),
    "leave": lambda engine: rounds_of(engine).leave(0),
}


@pytest.mark.parametrize("work", OTHER_WORK)
def test_other_work_on_a_slot_forgets_what_was_launched(engine: TorchEngine, prompts: list[Any], work: str) -> None:
    """The other slot's rounds are read as if nothing had been."""
    rounds = rounds_of(engine)
    bonus = prefill(engine, prompts[:2])
    expected = [result.tokens for result in one_round(engine, ask(bonus))]
    bonus = prefill(engine, prompts[:2])
    for _ in range(AHEAD):
        rounds.launch(ask(bonus))
    before = engine.length(0)
    OTHER_WORK[work](engine)
    assert engine.length(0) - before == (work == "prefill")
    (result,) = rounds.read().results
    assert (result.request.slot, result.tokens) == (1, expected[1])
    assert rounds.launchable([0, 1]) == [0, 1]


@pytest.mark.parametrize("request_", [{"budget": 0}, {"budget": 15, "chain": True}, {"budget": 16, "looks": True}])
def test_rounds_on_the_kernels(
    open_on_kernels: Callable[[Path], TorchEngine], tmp_path: Path, prompts: list[Any], request_: dict[str, Any]
) -> None:
    """Every operator of a round is the kernels' own source, and the same round with the host's gives the same: of one
    slot, and of three of which one draws."""
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16", max_batch=3).close()
    found: dict[str, Any] = {}
    for way in ("device", "host"):
        engine = open_on_kernels(tmp_path / "e")
        assert rounds_of(engine)._passes._ops is torch.ops.ddtree
        if way == "host":
            rounds_of(engine)._passes._ops = HostOps()
        alone = decode(engine, prefill(engine, prompts[:1]), 24 if request_["budget"] else 6, **request_)
        first, *others = ask(prefill(engine, prompts), **request_)
        requests = [first._replace(temperature=0.8, seed=3), *others]
        together = [result[1:3] for _ in range(2) for result in one_round(engine, requests)]
        found[way] = alone, together
    assert found["device"] == found["host"]
    assert (max(found["device"][0][1][0]) > 2) is (request_["budget"] > 0)


# Its parts


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 70))
def test_the_hosts_operators_are_the_reference(seed: int, tokens: int) -> None:
    """Masks and commits of padded trees, as the kernels compute them; neither is written in terms of the other."""
    given = plugin_reference.random_commit(np.random.default_rng(seed), tokens, tokens)
    for row, size in zip(given["parents"], given["counts"], strict=True):
        row[size:] = -1
    words = -(-tokens // 32) + 1
    mask = torch.full((3, tokens, words), 7, dtype=torch.int32)
    HostOps().packed_mask(torch.from_numpy(given["parents"]), mask)
    for n, parents in enumerate(given["parents"]):
        np.testing.assert_array_equal(mask[n].numpy(), plugin_reference.packed_mask(parents, words))
    expected = plugin_reference.commit(**given)
    HostOps().commit(**{name: torch.from_numpy(array) for name, array in given.items()})
    for name, wanted in zip(("cache", "waiting", "states", "result"), expected, strict=True):
        np.testing.assert_array_equal(given[name], wanted)


def test_choices_are_the_hosts() -> None:
    """The largest logit, or a draw by the noise of the position behind a node."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 700)).astype(np.float32)
    positions, temperatures = np.array([[5, 6, 6, 7]] * 3, np.int32), np.array([0, 0.7, 3], np.float32)
    seeds, choices = np.array([0, -5, 2**62]), torch.zeros(3, 4, dtype=torch.int32)
    given = [torch.from_numpy(array) for array in (logits, positions, temperatures, seeds)]
    HostOps().choose(given[0], given[1], given[2], given[3], choices)
    expected = plugin_reference.choose(logits, positions, temperatures, seeds)
    np.testing.assert_array_equal(choices.numpy(), expected)
    assert (expected[0] == logits[0].argmax(-1)).all() and (expected[1:] != logits[1:].argmax(-1)).any()
