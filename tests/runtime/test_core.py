"""The engine core: how it is put together, and what runs on it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from profiles import make_budgets, make_profile
from scripted import Letters, ScriptedEngine
from scripted_models import Good, MarkovTarget

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime import core as core_module
from ddtree_trt.runtime.core import EngineCore, open_core
from ddtree_trt.runtime.params import SamplingParams

PROMPT = [1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0]


class Codec(Letters):
    """Prompts are token ids."""

    def __init__(self, *_: Any) -> None:
        pass

    def encode(self, prompt: list[int], chat_template_kwargs: object = None, tools: object = None) -> list[int]:
        return list(prompt)


def make_engine(slots: int = 2) -> ScriptedEngine:
    target = MarkovTarget()
    return ScriptedEngine(target, Good(target), max_batch=slots)


def make_core(engine: ScriptedEngine) -> EngineCore:
    return EngineCore(engine, Codec(), make_budgets(make_profile(), 64, 3))  # type: ignore[arg-type]


def test_latencies_are_measured_while_opening(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, measured = make_engine(), []

    def measure(directory: Path, of: object, progress: object) -> object:
        measured.append((directory, of))
        return make_profile()

    monkeypatch.setattr(core_module, "load_or_measure", measure)
    monkeypatch.setattr(core_module, "TextCodec", Codec)
    open_core(tmp_path, engine=engine)
    assert measured == [(tmp_path, engine)]
    with pytest.raises(UsageError, match="device_rounds is on, but the onnxruntime backend"):
        open_core(tmp_path, engine=engine, device_rounds="on")
    assert len(measured) == 1, "what is refused anyhow is not measured for"


def test_a_request_cancelled_before_it_is_added_never_runs() -> None:
    engine = make_engine()
    core = make_core(engine)
    request = core.maker.make(PROMPT, SamplingParams(max_tokens=6))
    core.cancel(request)
    core.add(request)
    assert not core.scheduler.busy
    assert engine.calls == []


@pytest.mark.parametrize(("gpu", "reason"), [(True, None), (False, "there is no GPU")])
def test_metrics_say_where_rounds_run(gpu: bool, reason: str | None) -> None:
    engine: Any = make_engine()
    engine.manifest = dataclasses.replace(engine.manifest, backend="torch")
    engine.rounds = SimpleNamespace(by_default=gpu)
    metrics = make_core(engine).maker.make(PROMPT, SamplingParams(n=2, tree_budget=8)).output().metrics
    assert (metrics.on_device, metrics.why_host) == (gpu, reason)
