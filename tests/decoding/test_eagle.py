"""Method eagle on a real engine: an EAGLE-3 drafter over a random target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_eagle, make_target

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.engines import profile
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.profile import measure
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

PROMPT = [5, 9, 2, 40, 7]
LAYERS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a target with eight layers, whose usual taps the drafter reads."""
    path = tmp_path_factory.mktemp("eagle")
    target, drafter = make_target(path / "target", num_layers=LAYERS), make_eagle(path / "drafter")
    request = BuildRequest("pair", target, drafter, output=path / "engine", backend="onnxruntime", max_batch=3)
    compile_engine(request)
    return path / "engine"


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


def prompts(count: int, size: int = 6) -> list[list[int]]:
    return np.random.default_rng(size).integers(2, TARGET_DIMS.vocab_size, (count, size)).tolist()


MEASURE = measure  # before the fixture of all tests has nothing measured


def test_its_passes_are_measured_at_several_contexts(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each longer text continues the last one, behind which rounds had put other tokens."""
    monkeypatch.setattr(profile, "CONTEXTS", (40, 90))
    opened: Any = open_engine(engine, warm=False)
    try:
        measured = MEASURE(opened)
        assert measured.far is not None
        assert (measured.near.context, measured.far.context) == (40, 90)
        assert opened.length(0) == 0
    finally:
        opened.close()


def test_prefixes_of_other_requests_are_reused(llm: LLM) -> None:
    """Also where the new prompt goes another way at the first token behind them, and after one without drafts."""
    first = prompts(1, 40)[0]
    for other in ([*first, 7], [*first[:30], 3, 4], [*first[:30], 5], first):
        for method in ("eagle", "ar", "eagle"):
            found = llm.generate([other], SamplingParams(max_tokens=12, method=method, ignore_eos=True))[0]
            assert len(found.outputs[0].token_ids) == 12
    longer = llm.generate([[*first, 9]], SamplingParams(max_tokens=2, method="eagle", tree_budget=8))[0]
    assert longer.metrics.cached_tokens >= 38


def test_levels_of_a_fixed_budget(llm: LLM) -> None:
    """EAGLE's own number."""
    rounds: list[Round] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True, tree_budget=200)
    list(llm.stream(PROMPT, params, on_round=rounds.append))
    assert max(each.tree.depths.max() for each in rounds if len(each.tree) and not each.path[1:].size) == 8
