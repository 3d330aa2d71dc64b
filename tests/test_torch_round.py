"""The round on the device, run on the CPU: token for token what the host-built round gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_target
from engine_builds import PACKAGED, build_torch_engine
from plugin_libraries import torch_operators
from truth import FALSE_ALARM, chi_square

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime import torch_attention
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.load import open_engine
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text import TextCodec
from ddtree_trt.runtime.torch import TorchEngine
from ddtree_trt.runtime.torch_attention import KernelAttention
from ddtree_trt.runtime.torch_noise import gumbel, request_seed
from ddtree_trt.runtime.torch_round import DeviceRound, KernelOps

TOKENS = 50

pytestmark = pytest.mark.usefixtures("quick_profile")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("round") / "tiny"
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", path, max_batch=3, max_seq_len=320).close()
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[TorchEngine]:
    engine = open_engine(directory, threads=1)
    assert isinstance(engine, TorchEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    codec = TextCodec(directory, {})
    rows = (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [codec.encode([{"role": "user", "content": json.loads(row)["prompt"]}]) for row in rows[3::17]][:3]


@pytest.fixture(scope="module", params=[3, 16, 64])
def expected(request: pytest.FixtureRequest, directory: Path, prompts: list[Any]) -> tuple[int, list[RequestOutput]]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, method="ddtree", tree_budget=request.param)
    with LLM(directory) as llm:
        return request.param, llm.generate(prompts, params)


class Watcher:
    """Collects what comes out, until one sequence has enough."""

    def __init__(self, batch: int, enough: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.lengths: list[list[int]] = [[] for _ in range(batch)]
        self._enough = enough

    def __call__(self, n: int, tokens: list[int]) -> bool:
        self.tokens[n] += tokens
        self.lengths[n].append(len(tokens))
        return len(self.tokens[n]) < self._enough


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


def test_rounds_are_the_hosts(engine: TorchEngine, prompts: list[Any], expected: tuple[int, Any]) -> None:
    """Tokens and acceptance lengths of each sequence, alone and side by side."""
    budget, outputs = expected
    for group in ([0], [1], [0, 1, 2]):
        bonus = prefill(engine, [prompts[n] for n in group])
        watcher = Watcher(len(group), TOKENS - 1)
        DeviceRound(engine, len(group), budget).run(list(range(len(group))), bonus, watcher)
        for slot, n in enumerate(group):
            found, wanted = [bonus[slot], *watcher.tokens[slot]], outputs[n].outputs[0].token_ids
            assert begins_with(found, wanted) or begins_with(wanted, found)
            whole = outputs[n].metrics.acceptance_lengths[:-1]  # the last round may have been cut
            assert begins_with(watcher.lengths[slot], whole) or begins_with(whole, watcher.lengths[slot])
            assert engine.length(slot) == engine.draftable_length(slot) == len(prompts[n]) + len(found) - 1


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_engine_goes_on_where_rounds_stopped(
    engine: TorchEngine, prompts: list[Any], expected: tuple[int, Any], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds launched before the stop was seen leave no trace: the next ones are those of one long run."""
    monkeypatch.setattr("ddtree_trt.runtime.torch_round.AHEAD", ahead)
    budget, outputs = expected
    (bonus,) = prefill(engine, prompts[:1])
    tokens = [bonus]
    rounds = DeviceRound(engine, 1, budget)
    lengths: list[int] = []
    for enough in (1, 9, 1, 20):
        watcher = Watcher(1, enough)
        rounds.run([0], [tokens[-1]], watcher)
        tokens += watcher.tokens[0]
        lengths += watcher.lengths[0]
    wanted = outputs[0].outputs[0].token_ids
    assert begins_with(wanted, tokens) or begins_with(tokens, wanted)
    whole = outputs[0].metrics.acceptance_lengths[:-1]
    assert begins_with(whole, lengths) or begins_with(lengths, whole)


def test_rounds_end_where_the_slot_is_full(directory: Path, prompts: list[Any], engine: TorchEngine) -> None:
    (bonus,) = prefill(engine, prompts[:1])
    watcher = Watcher(1, 10_000)
    DeviceRound(engine, 1, 16).run([0], [bonus], watcher)
    limit, block = engine.limits.max_seq_len, engine.manifest.dflash.block_size
    assert limit - block < engine.length(0) <= limit
    assert engine.length(0) == len(prompts[0]) + len(watcher.tokens[0])


def test_draws_do_not_depend_on_the_tree(engine: TorchEngine, prompts: list[Any]) -> None:
    """With one seed every budget gives the same text, and another seed gives another."""
    texts = {}
    for seed, budget in ((1, 1), (1, 8), (1, 40), (2, 8)):
        (bonus,) = prefill(engine, prompts[:1])
        watcher = Watcher(1, 30)
        rounds = DeviceRound(engine, 1, budget, sampled=True)
        rounds.run([0], [bonus], watcher, seeds=[request_seed(seed, 0)], temperatures=[4.0])
        texts[seed, budget] = watcher.tokens[0][:30]
    assert texts[1, 1] == texts[1, 8] == texts[1, 40] != texts[2, 8]


def test_temperature_0_is_greedy(engine: TorchEngine, prompts: list[Any], expected: tuple[int, Any]) -> None:
    budget, outputs = expected
    (bonus,) = prefill(engine, prompts[:1])
    watcher = Watcher(1, 20)
    DeviceRound(engine, 1, budget, sampled=True).run([0], [bonus], watcher, seeds=[5], temperatures=[0.0])
    assert begins_with(outputs[0].outputs[0].token_ids, [bonus, *watcher.tokens[0][:20]])


def test_noise_draws_from_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5])
    seeds = torch.tensor([request_seed(7, i) for i in range(40)])
    for temperature in (0.6, 1.0):
        noise = gumbel(seeds, torch.arange(500).expand(40, -1), len(logits))
        assert noise.dtype == torch.float32 and torch.isfinite(noise).all()
        drawn = (logits + temperature * noise).argmax(-1).flatten().tolist()
        p = (logits / temperature).softmax(0).tolist()
        counts = {(t,): drawn.count(t) for t in range(len(p))}
        assert chi_square(counts, {(t,): q for t, q in enumerate(p)}) > FALSE_ALARM


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds = torch.tensor([request_seed(0, 0), request_seed(0, 1)])
    whole = gumbel(seeds, torch.tensor([[5, 6], [6, 9]]), 50)
    assert torch.equal(whole[:1, 1:], gumbel(seeds[:1], torch.tensor([[6]]), 50))
    assert torch.equal(whole[..., :7], gumbel(seeds, torch.tensor([[5, 6], [6, 9]]), 7))
    assert not torch.equal(whole[0, 1], whole[1, 0])
    assert abs(float(np.corrcoef(whole.flatten(0, 1).numpy()[:2])[0, 1])) < 0.5
    assert request_seed(None, 0) != request_seed(None, 0)


def test_forced_rounds_commit_what_is_forced(engine: TorchEngine, prompts: list[Any]) -> None:
    (bonus,) = prefill(engine, prompts[:1])
    watcher = Watcher(1, 30)
    DeviceRound(engine, 1, 32, forced=5).run([0], [bonus], watcher)
    assert set(watcher.lengths[0]) == {5}


@pytest.mark.timeout(300)
def test_rounds_on_the_kernels(
    directory: Path, tmp_path: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round as a GPU runs it, but for the graph: every operator is the kernels' own source on the CPU."""
    library = torch_operators()
    monkeypatch.setattr(torch_attention, "find", lambda name: library)
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16").close()
    monkeypatch.setattr("ddtree_trt.runtime.torch.attention_for", lambda device, *_: KernelAttention(device))
    found = {}
    for way in ("device", "host"):
        engine = open_engine(tmp_path / "e")
        assert isinstance(engine, TorchEngine) and engine.kernels
        (bonus,) = prefill(engine, prompts[:1])
        rounds = DeviceRound(engine, 1, 16)
        assert isinstance(rounds._ops, KernelOps)
        if way == "host":
            from ddtree_trt.runtime.torch_round import HostOps

            rounds._ops = HostOps()
        watcher = Watcher(1, 24)
        rounds.run([0], [bonus], watcher)
        found[way] = watcher.tokens[0], watcher.lengths[0]
    assert found["device"] == found["host"]
    assert max(found["device"][1]) > 2


def test_what_cannot_be_done_is_refused(engine: TorchEngine, tmp_path: Path) -> None:
    for budget in (0, 257):
        with pytest.raises(UsageError, match=f"trees of 1 to 256 nodes, not of {budget}"):
            DeviceRound(engine, 1, budget)
    target, drafter = make_target(tmp_path / "t"), make_target(tmp_path / "d", tokenizer=False)
    other = build_torch_engine(target, drafter, tmp_path / "e")
    with pytest.raises(UsageError, match="needs a block drafter"):
        DeviceRound(other, 1, 4)
