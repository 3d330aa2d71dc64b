"""Device rounds as users have them, `LLM(device_rounds=…)`, on a CPU, where a round is the same without a graph: their
output, which requests have them, and what they draw."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_builds import CHATS, PACKAGED, ROWS, build_torch_engine
from typer.testing import CliRunner

from ddtree_trt.cli import app
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget
from ddtree_trt.runtime.engines.base import AHEAD, RoundRequest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.stats import ROUND_STAGES

TOKENS = 60
SLOTS = 3
BYTES, OBJECTS = 1 << 20, 48  # of growth: what is kept of costs comes and goes, and libraries have caches
LEARN = Costs.learn  # before the fixture of all tests has rounds correct nothing


def greedy(tree_budget: int | str = 16, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "method": "ddtree", "tree_budget": tree_budget, **options})


def rounds_of(llm: LLM) -> TorchRounds:
    assert isinstance(llm.engine, TorchEngine) and llm.engine.rounds is not None
    return llm.engine.rounds


@pytest.fixture(scope="module")
def device(directory: Path) -> Iterator[LLM]:
    with LLM(directory, threads=1, device_rounds="on") as llm:
        yield llm


@pytest.fixture(scope="module")
def host(directory: Path) -> Iterator[LLM]:
    with LLM(directory, threads=1, device_rounds="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    """Of every domain, and at the end two whose answers are short."""
    short = sorted(range(len(ROWS)), key=lambda i: len(ROWS[i]["reference"]))[:2]
    return [*CHATS[::9], *(CHATS[i] for i in short)]


@pytest.fixture(scope="module")
def plain(host: LLM, prompts: list[Any]) -> dict[bool, list[Any]]:
    """What the target says by itself; by whether it goes on past its end."""

    def alone(going: bool) -> list[Any]:
        return host.generate(prompts, SamplingParams(max_tokens=TOKENS, method="ar", ignore_eos=going))

    return {going: alone(going) for going in (False, True)}


def lose_the_device(requests: Sequence[RoundRequest] = ()) -> None:
    raise EngineError("the device is gone")


KINDS: dict[str, dict[str, Any]] = {
    **{f"{nodes} nodes": {"tree_budget": nodes} for nodes in (1, 16)},
    "ar": {"method": "ar", "tree_budget": "auto"},
    "dflash": {"method": "dflash", "tree_budget": "auto"},
    "dflash 5": {"method": "dflash", "tree_budget": 5},
    "no drafts": {"tree_budget": 0},
    "auto": {"tree_budget": "auto"},
}


@pytest.mark.parametrize(("kind", "ignore_eos"), [*((kind, False) for kind in KINDS), ("16 nodes", True)])
def test_output_is_the_hosts_and_that_of_ar(
    host: LLM, device: LLM, prompts: list[Any], plain: dict[bool, list[Any]], kind: str, ignore_eos: bool
) -> None:
    """Tokens, text, reason and, of fixed budgets, acceptance of every round, for more prompts than slots; caches that
    are left behind hold what they say."""
    assert len(prompts) > SLOTS
    params = greedy(**KINDS[kind], ignore_eos=ignore_eos)
    wanted, found = host.generate(prompts, params), device.generate(prompts, params)
    for ar, a, b in zip(plain[ignore_eos], wanted, found, strict=True):
        assert ar.outputs == a.outputs == b.outputs
        if kind != "auto":
            assert a.metrics.acceptance_lengths == b.metrics.acceptance_lengths
            assert a.metrics.budgets == b.metrics.budgets
        assert (a.metrics.on_device, a.metrics.why_host) == (False, "device_rounds is off")
        assert (b.metrics.on_device, b.metrics.why_host) == (True, None)
        assert b.metrics.rounds_on_device == b.metrics.rounds
        assert b.metrics.stage_s["device_round"] > 0 == b.metrics.stage_s["verify"]
    drafts = kind not in ("ar", "no drafts")
    assert (sum(o.metrics.accepted_tokens for o in found) > 0) is drafts
    assert (sum(o.metrics.automatic.drafted for o in found) > 0) is (kind == "auto")
    assert {o.outputs[0].finish_reason for o in found} >= ({"length"} if ignore_eos else {"stop"})


def test_limits_and_stops_cut_inside_a_round(host: LLM, device: LLM, prompts: list[Any]) -> None:
    """At a length, at a stop token, and at a string, which may take back tokens."""
    whole = host.generate(prompts[0], greedy(64))[0]
    ids, text = whole.outputs[0].token_ids, whole.outputs[0].text
    assert max(whole.metrics.acceptance_lengths) > 4
    for llm in (host, device):
        llm.reset_prefix_cache()
    cuts = [greedy(64, max_tokens=n) for n in range(1, len(ids), 7)]
    cuts += [greedy(64, stop_token_ids=(token,), ignore_eos=True) for token in list(dict.fromkeys(ids))[::9]]
    cuts += [greedy(64, stop=(text[i : i + 4],), ignore_eos=True) for i in range(0, len(text) - 4, 41)]
    for params in cuts:
        (wanted,), (found,) = host.generate(prompts[0], params), device.generate(prompts[0], params)
        assert found.outputs == wanted.outputs
        assert found.metrics.acceptance_lengths == wanted.metrics.acceptance_lengths
        # Slot 0 is the one whose cache saves most of the prompt; what it holds are the first tokens of both outputs.
        assert host.engine.length(0) == device.engine.length(0) >= found.usage.prompt_tokens


@pytest.fixture
def mixed(device: LLM, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Requests choose as on a GPU."""
    monkeypatch.setattr(device.core.maker, "device_rounds", "auto")
    monkeypatch.setattr(rounds_of(device), "by_default", True)
    return monkeypatch


def test_one_that_cannot_be_on_the_device_has_the_others_beside_it(
    host: LLM, device: LLM, prompts: list[Any], mixed: Any
) -> None:
    """In one pass over the weights; before and after it they are on the device, and nobody notices."""
    wanted = [greedy(16), greedy("auto"), greedy(16, logprobs=1, max_tokens=12)]
    expected = host.generate(prompts[:3], wanted)
    verified: list[int] = []
    verify = device.engine.verify

    def record(requests: Any) -> Any:
        verified.append(len(requests))
        return verify(requests)

    mixed.setattr(device.engine, "verify", record)
    parts = [device.stream(prompts[i], wanted[i]) for i in (0, 1)]
    said = [next(part).outputs[0].token_ids for part in parts]
    said[0] += next(parts[0]).outputs[0].token_ids
    assert not verified
    (third,) = device.generate(prompts[2:3], wanted[2])
    assert set(verified) == {3} and third.metrics.why_host == "logprobs works on logits, which stay on the device"
    rest = [list(part) for part in parts]
    for tokens, more, output in zip(said, rest, expected[:2], strict=True):
        assert tokens + [t for part in more for t in part.outputs[0].token_ids] == output.outputs[0].token_ids
        metrics = more[-1].metrics
        assert metrics.on_device and 0 < metrics.rounds_on_device < metrics.rounds
        assert all(metrics.stage_s[stage] > 0 for stage in ("device_round", *ROUND_STAGES))
    assert third.outputs[0].token_ids == expected[2].outputs[0].token_ids
    assert third.metrics.rounds_on_device == 0


@pytest.mark.parametrize("verb", ["launch", "read"])
def test_a_failing_round_ends_those_in_it(host: LLM, device: LLM, prompts: list[Any], mixed: Any, verb: str) -> None:
    """And leaves an engine that works."""
    parts = [device.stream(prompt, greedy()) for prompt in prompts[:2]]
    assert next(parts[0]) and next(parts[1])
    with mixed.context() as patch:
        patch.setattr(rounds_of(device), verb, lose_the_device)
        for part in parts:
            with pytest.raises(EngineError, match="the device is gone"):
                list(part)
    assert device.core.scheduler.free_slots == SLOTS
    assert device.generate(prompts[0], greedy())[0].outputs == host.generate(prompts[0], greedy())[0].outputs


def test_profiling_waits_for_rounds(directory: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next stage would count the rest of a round launched ahead as its own."""
    with LLM(directory, threads=1, device_rounds="on", exact_stage_times=True) as llm:
        settled: list[None] = []
        monkeypatch.setattr(llm.core.scheduler.clock, "_synchronize", lambda: settled.append(None))
        (output,) = llm.generate(prompts[0], greedy())
        chunks = -(-len(output.prompt_token_ids) // llm.engine.manifest.limits.prefill_chunk)
    assert len(settled) == chunks + output.metrics.rounds


@pytest.mark.parametrize("rounds", [90, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_nothing_grows_with_the_rounds(
    rounds: int, directory: Path, prompts: list[Any], replayed: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever requests come, end, leave in the middle and begin with what a slot holds: neither passes, nor memory
    that the host keeps for them, nor any object. No round is made twice: those launched are those read and those under
    way, at all times."""
    monkeypatch.setattr(Costs, "learn", LEARN)
    rng, made, cached = np.random.default_rng(0), Counter[str](), 0
    kinds = [*KINDS.values(), {"tree_budget": "auto", "temperature": 0.8, "seed": 1}]

    def counted(verb: str) -> Any:
        work = getattr(TorchRounds, verb)

        def count(self: TorchRounds, *given: Any) -> Any:
            found = work(self, *given)
            made[verb] += 1
            made["passes"] += len(self._launched[-1]) if verb == "launch" else 0
            assert made["launch"] == made["read"] + self.ahead and self.ahead <= AHEAD
            return found

        return count

    def play(until: int) -> tuple[int, Counter[type]]:
        """Serve requests until so many rounds were read: the bytes and the objects there are then."""
        nonlocal cached
        going: list[Any] = []
        while made["read"] < until or going:
            if made["read"] < until and len(going) < 5 and rng.random() < 0.2:
                params = greedy(**kinds[rng.integers(len(kinds))], max_tokens=int(rng.integers(1, 40)))
                going.append(llm.stream(prompts[rng.integers(len(prompts))], params))
            if going:
                one = going[rng.integers(len(going))]
                if (part := next(one, None)) is None or rng.random() < 0.01:
                    one.close()
                    going.remove(one)
                cached += part is not None and part.metrics.cached_tokens > 0
        assert not held._members and len(held._entries) + sum(map(len, held._launched)) <= AHEAD + 1
        gc.collect()
        return tracemalloc.get_traced_memory()[0], Counter(map(type, gc.get_objects()))

    with LLM(directory, threads=1, device_rounds="on") as llm:
        held = rounds_of(llm)
        for verb in ("launch", "read"):
            monkeypatch.setattr(TorchRounds, verb, counted(verb))
        for kind in kinds:  # libraries make what they keep
            llm.generate(prompts[:1], greedy(**kind, max_tokens=8))
        tracemalloc.start()
        try:
            (used, objects), (_, then), (used_later, later) = (play(rounds * part // 3) for part in (1, 2, 3))
        finally:
            tracemalloc.stop()
    grown = [{t for t, n in (b - a).items() if n > OBJECTS} for a, b in ((objects, then), (then, later))]
    assert cached and used_later < used + BYTES and not grown[0] & grown[1], "what grows once is a library's cache"
    sizes: set[tuple[Any, ...]] = {("round", *shape) for shape in held.shapes.verifications()}
    sizes |= {("round draft", *shape) for shape in held.shapes.drafts()}
    assert replayed.keys() <= sizes and made["passes"] == sum(n for key, n in replayed.items() if key[0] == "round")


# What cannot be served


def test_others_are_refused(device: LLM) -> None:
    """Each field by itself in `test_methods`."""
    for options, reason in (
        ({"method": "dflash-sample"}, "method 'dflash-sample' draws its drafts"),
        ({"presence_penalty": 0.5, "min_tokens": 3}, "min_tokens, presence_penalty work on logits"),
    ):
        with pytest.raises(UsageError, match=f"device_rounds is on, but {reason}.*; use auto or off"):
            device.generate("Once", greedy(8, **options))


def test_auto_asks_the_engine(directory: Path) -> None:
    with LLM(directory, threads=1) as llm:
        (output,) = llm.generate("Once", greedy(max_tokens=4))
        assert output.metrics.why_host == "there is no GPU"
        rounds_of(llm).by_default = True
        (output,) = llm.generate("Once", greedy(max_tokens=4))
        assert output.metrics.on_device and output.metrics.why_host is None
        (output,) = llm.generate("Once", SamplingParams(max_tokens=4, logprobs=1))
        assert output.metrics.why_host == "logprobs works on logits, which stay on the device"
        assert output.metrics.to_dict()["on_device"] is False


def test_an_engine_is_closed_when_its_rounds_are_done(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those launched in vain: memory they write to may not be another's by then."""
    held: list[bool] = []
    llm = LLM(directory, threads=1, device_rounds="on")
    engine = llm.engine
    monkeypatch.setattr(engine, "synchronize", lambda: held.append(bool(rounds_of(llm)) and hasattr(engine, "target")))
    llm.close()
    assert held == [True] and engine.rounds is None and not hasattr(engine, "target")


def test_the_command_line_says_which_rounds_ran(directory: Path, tiny_engine: Path) -> None:
    def run(*words: str, engine: Path = directory) -> str:
        done = CliRunner().invoke(app, [words[0], str(engine), *words[1:]])
        return f"{done.output}{done.exception}"

    asked = ("run", "-p", "Once", "--max-tokens", "6", "--threads", "1", "--tree-budget", "8")
    on = (*asked, "--device-rounds", "on")
    assert "rounds on the device" in run(*on)
    assert "did not stay on the device: there is no GPU" in run(*asked, "--show-tree")
    assert "its trees are watched" in run(*on, "--show-tree")
    assert "on a GPU, methods ar, dflash and ddtree" in run("inspect")
    assert "none: the onnxruntime backend builds trees on the host" in run("inspect", engine=tiny_engine)


# At a temperature


@pytest.mark.parametrize(("temperature", "budgets"), [(0.7, (16, "auto")), (2.0, (2, 16))])
def test_device_and_host_draw_the_same_tokens(
    device: LLM, host: LLM, prompts: list[Any], temperature: float, budgets: tuple[int | str, ...]
) -> None:
    """One rule: with one seed, rounds on the device, by stages and without drafts give one text, and another seed gives
    another."""
    drawn = {"temperature": temperature, "seed": 1, "max_tokens": 32, "n": 2}
    wanted = [greedy(budget, **drawn) for budget in budgets]
    wanted += [greedy("auto", method=method, **drawn) for method in ("ar", "dflash")]
    outputs = [device.generate(prompts[:3], params) for params in wanted]
    assert all(output.metrics.on_device for each in outputs for output in each)
    outputs += [host.generate(prompts[:3], params) for params in wanted[1:3]]
    tokens = [[c.token_ids for output in each for c in output.outputs] for each in outputs]
    assert tokens == [tokens[0]] * len(tokens)
    assert tokens[0][0] != tokens[0][1], "completions of one prompt"
    (other,) = device.generate(prompts[0], greedy(temperature=temperature, seed=2))
    assert other.outputs[0].token_ids != tokens[0][0]


def test_budgets_learn_from_rounds_on_device(device: LLM, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of every round's tree."""
    kept: list[int] = []
    observe = AutoBudget.observe

    def record(self: Any, decision: Any, tree: Any, path: Any, **how: Any) -> None:
        observe(self, decision, tree, path, **how)
        kept.append(len(path))

    monkeypatch.setattr(AutoBudget, "observe", record)
    (output,) = device.generate(prompts[0], greedy("auto"))
    assert kept == output.metrics.acceptance_lengths


@pytest.mark.parametrize("rounds", ["on", "off"])
def test_trees_smaller_than_the_block(tmp_path: Path, rounds: Any) -> None:
    """Whatever chooses the size: a budget that is automatic, and the chain of a block that is longer."""
    build_torch_engine(
        PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", max_batch=2, max_seq_len=400, max_tree_budget=3
    ).close()
    with LLM(tmp_path / "e", threads=1, device_rounds=rounds) as llm:
        expected = llm.generate(CHATS[:2], SamplingParams(max_tokens=TOKENS, method="ar"))
        for method in ("ddtree", "dflash"):
            found = llm.generate(CHATS[:2], SamplingParams(max_tokens=TOKENS, method=method))
            assert [f.outputs[0].token_ids for f in found] == [e.outputs[0].token_ids for e in expected]
            assert 1 < found[0].metrics.mean_acceptance_length <= 4
