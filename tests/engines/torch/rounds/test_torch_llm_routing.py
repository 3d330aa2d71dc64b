"""Which requests are decoded in device rounds, which are refused, and who says so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pacing import complete
from torch_rounds import greedy, rounds_of
from typer.testing import CliRunner

from ddtree_trt import AsyncLLM
from ddtree_trt.cli import app
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

LOGITS: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 2},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
]


# What cannot be served


@pytest.mark.parametrize("options", LOGITS, ids=lambda o: "-".join(o))
def test_what_needs_logits_is_refused_or_done_on_the_host(host: LLM, device: LLM, options: dict[str, Any]) -> None:
    name = next(key for key in options if key != "temperature")
    params = greedy(8, max_tokens=4, seed=1, **options)
    with pytest.raises(UsageError, match=f"device_rounds is on, but {name} works on logits"):
        device.generate("Once", params)
    (output,) = host.generate("Once", params)
    assert not output.metrics.on_device


def test_filters_change_nothing_at_temperature_0(host: LLM, device: LLM, prompts: list[Any]) -> None:
    params = greedy(8, top_k=3, top_p=0.5, min_p=0.1)
    assert device.generate(prompts[0], params)[0].outputs == host.generate(prompts[0], params)[0].outputs


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "ar", "tree_budget": "auto"}, "method 'ar' builds no tree"),
        ({"method": "dflash", "tree_budget": 8}, "method 'dflash' builds no tree"),
        ({"tree_budget": "auto"}, "tree_budget 'auto' weighs every tree on the host: give a number"),
        ({"tree_budget": 0}, "the device builds trees of 1 to 1024 nodes, not of 0"),
    ],
)
def test_other_trees_are_refused(device: LLM, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"device_rounds is on, but {reason}; use auto or off"):
        device.generate("Once", SamplingParams(**{"method": "ddtree", "tree_budget": 8, **options}))


def test_watched_trees_are_built_on_the_host(host: LLM, device: LLM) -> None:
    with pytest.raises(UsageError, match="its trees are watched"):
        device.stream("Once", greedy(), on_round=lambda _: None)
    seen: list[Any] = []
    assert list(host.stream("Once", greedy(), on_round=seen.append)) and seen


def test_auto_asks_the_engine(directory: Path) -> None:
    with LLM(directory, threads=1) as llm:
        (output,) = llm.generate("Once", greedy(max_tokens=4))
        assert output.metrics.why_host == "there is no GPU"
        rounds_of(llm).by_default = True
        (output,) = llm.generate("Once", greedy(max_tokens=4))
        assert output.metrics.on_device and output.metrics.why_host is None
        (output,) = llm.generate("Once", SamplingParams(max_tokens=4))
        assert output.metrics.why_host == "tree_budget 'auto' weighs every tree on the host: give a number"
        assert output.metrics.to_dict()["on_device"] is False


def test_other_engines_have_none(tiny_engine: Path) -> None:
    with pytest.raises(UsageError, match="device_rounds is on, but the onnxruntime backend builds trees on the host"):
        LLM(tiny_engine, device_rounds="on")
    with pytest.raises(UsageError, match="device_rounds must be one of auto, on, off, not 'yes'"):
        LLM(tiny_engine, device_rounds="yes")
    with LLM(tiny_engine) as llm:
        (output,) = llm.generate("Once", greedy(max_tokens=4))
    assert output.metrics.why_host == "the onnxruntime backend builds trees on the host"


def test_async_callers_have_them_too(directory: Path, host: LLM, prompts: list[Any]) -> None:
    async def run() -> list[Any]:
        llm = AsyncLLM(directory, threads=1, device_rounds="on")
        try:
            return list(await asyncio.gather(*(complete(llm, p, greedy()) for p in prompts[:4])))
        finally:
            llm.shutdown()

    found = asyncio.run(run())
    assert [o.outputs for o in found] == [o.outputs for o in host.generate(prompts[:4], greedy())]
    assert all(o.metrics.on_device for o in found)


def test_an_engine_is_closed_when_its_rounds_are_done(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those launched in vain: memory they write to may not be another's by then."""
    held: list[bool] = []
    llm = LLM(directory, threads=1, device_rounds="on")
    engine = llm.engine
    monkeypatch.setattr(engine, "synchronize", lambda: held.append(bool(rounds_of(llm)) and hasattr(engine, "target")))
    llm.close()
    assert held == [True] and engine.rounds is None and not hasattr(engine, "target")


def test_the_command_line_says_which_rounds_ran(directory: Path, tiny_engine: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, [words[0], str(directory), *words[1:]])

    asked = ("run", "-p", "Once", "--max-tokens", "6", "--threads", "1")
    on = (*asked, "--tree-budget", "8", "--device-rounds", "on")
    output = run(*on, "--json")
    assert output.exit_code == 0, output.output
    metrics = json.loads(output.output)["metrics"]
    assert (metrics["on_device"], metrics["why_host"]) == (True, None)
    assert "rounds on the device" in run(*on).output
    assert "did not stay on the device: there is no GPU" in run(*asked, "--tree-budget", "8", "--show-tree").output
    for words, message in (
        ((*on, "--show-tree"), "its trees are watched"),
        ((*asked, "--device-rounds", "on"), "tree_budget 'auto' weighs every tree on the host"),
        ((*asked, "--device-rounds", "maybe"), "'maybe' is not one of 'auto', 'on', 'off'"),
    ):
        refused = run(*words)
        assert refused.exit_code == 2 or isinstance(refused.exception, UsageError)
        assert message in f"{refused.output}{refused.exception}"
    assert "on a GPU, method ddtree with a fixed budget" in run("inspect").output
    other = CliRunner().invoke(app, ["inspect", str(tiny_engine)])
    assert "none: the onnxruntime backend builds trees on the host" in other.output
