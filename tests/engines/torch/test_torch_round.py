"""The round on the device, run on the CPU: token for token what the host-built round gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_reference as plugin_reference
import numpy as np
import pytest
import torch
from engine_builds import CHATS, PACKAGED, build_torch_engine
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt.device.buffers import buckets
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, RoundRequest, VerifyRequest
from ddtree_trt.runtime.engines.torch.device_round import DeviceRound, HostOps, KernelOps
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import token_chain

TOKENS = 50


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    codec = TextCodec(directory, {})
    return [codec.encode(chat) for chat in CHATS[3::17][:3]]


@pytest.fixture(scope="module", params=[3, 16, 64])
def expected(request: pytest.FixtureRequest, directory: Path, prompts: list[Any]) -> tuple[int, list[RequestOutput]]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, method="ddtree", tree_budget=request.param)
    with LLM(directory) as llm:
        return request.param, llm.generate(prompts, params)


def decode(engine: TorchEngine, bonus: list[int], tokens: int, **request: Any) -> tuple[list[Any], list[Any]]:
    """Rounds of slots 0, 1, … until one of them has so many tokens: the tokens of each, and how many by round."""
    assert engine.rounds is not None
    request = {"budget": 16, **request}
    requests = [RoundRequest(slot, token, **request) for slot, token in enumerate(bonus)]
    found: list[list[int]] = [[] for _ in bonus]
    lengths: list[list[int]] = [[] for _ in bonus]
    while max(map(len, found)) < tokens:
        for slot, result in enumerate(engine.rounds.round(requests)):
            found[slot] += result.tokens
            lengths[slot].append(len(result.tokens))
            requests[slot] = replace(requests[slot], bonus_token=result.tokens[-1])
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


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_engine_goes_on_where_rounds_stopped(
    engine: TorchEngine, prompts: list[Any], expected: tuple[int, Any], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds launched in vain leave no trace: what comes after a flight was left, also in the middle of a round's
    tokens, is what one long run says. Another slot, and rounds of two slots, in between."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.rounds.AHEAD", ahead)
    budget, outputs = expected
    bonus = prefill(engine, prompts[:2])
    said, other = [bonus[0]], [bonus[1]]
    for kept in (1, 9, 2, 12):
        tokens, _ = decode(engine, said[-1:], kept, budget=budget)
        said += tokens[0][:kept]
        engine.truncate(0, len(prompts[0]) + len(said) - 1)
        tokens, _ = decode(engine, [said[-1], other[-1]], 1, budget=budget)
        said += tokens[0]
        other += tokens[1]
    for found, output in ((said, outputs[0]), (other, outputs[1])):
        wanted = output.outputs[0].token_ids
        assert begins_with(wanted, found) or begins_with(found, wanted)


def test_slots_of_one_round_have_budgets_of_their_own(engine: TorchEngine, prompts: list[Any]) -> None:
    """Trees of different sizes share a pass; a slot's rounds are those it has alone."""
    assert engine.rounds is not None
    alone = []
    for n, budget in enumerate((3, 40, 16)):
        bonus = prefill(engine, prompts[n : n + 1])
        requests = [RoundRequest(0, bonus[0], budget)]
        alone.append(engine.rounds.round(requests)[0])
        assert alone[-1].nodes == budget
    bonus = prefill(engine, prompts)
    together = engine.rounds.round([RoundRequest(n, bonus[n], budget) for n, budget in enumerate((3, 40, 16))])
    assert together == alone


def test_padding_changes_nothing(engine: TorchEngine, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a GPU: trees of 3, 16 and 40 nodes in passes of 4, 32 and 48 tokens, which other budgets share."""
    assert engine.rounds is not None
    expected = [decode(engine, prefill(engine, prompts[:1]), 20, budget=budget) for budget in (3, 16, 40)]
    engine.target.buckets = buckets(engine.limits.max_tokens_per_pass)
    found = [decode(engine, prefill(engine, prompts[:1]), 20, budget=budget) for budget in (3, 16, 40)]
    assert found == expected
    made = [engine.rounds.made_for([RoundRequest(0, 0, budget)]) for budget in (3, 16, 17, 31, 40)]
    assert made[1] is made[2] is made[3] and made[0] is not made[1] is not made[4]


def test_rounds_go_on_to_the_slots_end(engine: TorchEngine, prompts: list[Any]) -> None:
    """The last ones are not launched ahead; then there is no room."""
    (bonus,) = prefill(engine, prompts[:1])
    with pytest.raises(EngineError, match="cache rows, 17 more do not fit"):
        decode(engine, [bonus], 10_000)
    rows, block = engine.target.cache.rows, engine.manifest.drafting.dims.block_size
    assert engine.limits.max_seq_len <= rows - 17 - block < engine.length(0) <= rows


def test_temperature_0_is_greedy_beside_another(
    engine: TorchEngine, prompts: list[Any], expected: tuple[int, Any]
) -> None:
    assert engine.rounds is not None
    budget, outputs = expected
    bonus = prefill(engine, prompts[:2])
    requests = [RoundRequest(0, bonus[0], budget), RoundRequest(1, bonus[1], budget, temperature=4.0, seed=5)]
    found = engine.rounds.round(requests)
    assert begins_with(outputs[0].outputs[0].token_ids, [bonus[0], *found[0].tokens])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_lie_where_the_engine_has_room_for_them(
    engine: TorchEngine, prompts: list[Any], temperature: float
) -> None:
    """Nothing that a pass writes is larger, and the memory plan counts it once."""
    bonus = prefill(engine, prompts[:2])
    engine.target.logits.fill_(torch.nan)
    decode(engine, bonus, 1, temperature=temperature)
    assert torch.isfinite(engine.target.logits[: 2 * 17]).all()


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
    "rounds": lambda engine: TorchRounds(engine.target, engine.drafter).round([RoundRequest(0, 9, 16)]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("work", OTHER_WORK)
def test_other_work_on_a_slot_ends_its_flight(
    engine: TorchEngine, prompts: list[Any], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round begins from the host's counts; work on another slot changes nothing."""
    assert engine.rounds is not None
    starts: list[DeviceRound] = []
    start = DeviceRound.start

    def record(self: DeviceRound, requests: Any) -> None:
        starts.append(self)
        start(self, requests)

    (bonus,) = prefill(engine, prompts[:1])
    own = engine.rounds.made_for([RoundRequest(0, bonus, 16)])
    monkeypatch.setattr(DeviceRound, "start", record)
    for _ in range(2):
        (result,) = engine.rounds.round([RoundRequest(0, bonus, 16)])
        bonus = result.tokens[-1]
        engine.prefill(1, np.array([7, 8]), rows="none", taps=True)
    assert starts.count(own) == 1
    OTHER_WORK[work](engine)
    engine.rounds.round([RoundRequest(0, bonus, 16)])
    assert starts.count(own) == 2


def test_a_start_that_fails_ends_the_flight_before_it(
    engine: TorchEngine, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are one object of tensors, which the start has overwritten in part."""
    assert engine.rounds is not None
    first, second = prefill(engine, prompts[:2])
    found, _ = decode(engine, [first], 4)
    start = DeviceRound.start

    def fail(self: DeviceRound, requests: Any) -> None:
        start(self, requests)
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device is lost"):
        patch.setattr(DeviceRound, "start", fail)
        engine.rounds.round([RoundRequest(1, second, 16)])
    later, _ = decode(engine, [found[0][-1]], 20)
    prefill(engine, prompts[:1])
    expected, _ = decode(engine, [first], 40)
    assert begins_with(expected[0], (found[0] + later[0])[:30])


def test_rounds_on_the_kernels(
    open_on_kernels: Callable[[Path], TorchEngine], tmp_path: Path, prompts: list[Any]
) -> None:
    """Every operator of a round is the kernels' own source, and the same round with the host's gives the same."""
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16").close()
    found = {}
    for way in ("device", "host"):
        engine = open_on_kernels(tmp_path / "e")
        assert engine.rounds is not None
        rounds = engine.rounds.made_for([RoundRequest(0, 0, 16)])
        assert isinstance(rounds._ops, KernelOps)
        if way == "host":
            rounds._ops = HostOps()
        found[way] = decode(engine, prefill(engine, prompts[:1]), 24)
    assert found["device"] == found["host"]
    assert max(found["device"][1][0]) > 2


# Its parts


@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_the_hosts_operators_are_the_reference(seed: int, sizes: list[int]) -> None:
    """Masks and walks of padded trees, as the kernels compute them; neither is written in terms of the other."""
    rng, tokens = np.random.default_rng(seed), 70
    parents = np.full((len(sizes), tokens), -1, np.int32)
    for row, size in zip(parents, sizes, strict=True):
        row[1:size] = [rng.integers(0, i) for i in range(1, size)]
    token_ids, choices = (rng.integers(0, 4, parents.shape).astype(np.int32) for _ in range(2))
    past = rng.integers(0, 50, len(sizes)).astype(np.int32)
    words = -(-tokens // 32) + 1
    mask = torch.full((len(sizes), tokens, words), 7, dtype=torch.int32)
    tree, said, drafted = (torch.from_numpy(a) for a in (parents, choices, token_ids))
    HostOps().packed_mask(tree, mask)
    path = torch.zeros(parents.shape, dtype=torch.int32)
    lengths, following, new_past = (torch.zeros(len(sizes), dtype=torch.int32) for _ in range(3))
    counts = torch.tensor(sizes, dtype=torch.int32)
    HostOps().walk(tree, drafted, said, counts, torch.from_numpy(past), path, lengths, following, new_past)
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(mask[n].numpy(), plugin_reference.packed_mask(parents[n], words))
        nodes = plugin_reference.walk(parents[n], token_ids[n], choices[n], size)
        assert path[n].tolist() == [*nodes, *[-1] * (tokens - len(nodes))]
        found = (int(lengths[n]), int(following[n]), int(new_past[n]))
        assert found == (len(nodes), choices[n, nodes[-1]], past[n] + len(nodes))
