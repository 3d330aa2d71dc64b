"""Method draft-model on real engines: an autoregressive drafter, built from random checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_eagle, make_target
from drafts import marginals
from profiles import CHAINS

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime import core
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines import profile
from ddtree_trt.runtime.engines.base import DraftRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.profile import measure
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

PROMPT = [5, 9, 2, 40, 7]


def build(path: Path, **drafter: Any) -> Path:
    """An engine whose target is always the same and whose drafter is `make_target(**drafter)`."""
    target = make_target(path / "target")
    make_target(path / "drafter", tokenizer=False, **drafter)
    request = BuildRequest(target="pair", checkpoint=target, drafter=path / "drafter", output=path / "engine")
    compile_engine(request)
    return path / "engine"


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The drafter is the target itself: what it drafts greedily is always right."""
    with LLM(build(tmp_path_factory.mktemp("same"))) as llm:
        yield llm


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter is another network, untied and of another shape, whose tokens are hardly ever the target's."""
    shape = {"num_layers": 1, "hidden_size": 24, "num_heads": 2, "num_kv_heads": 1, "tied": False, "seed": 3}
    return build(tmp_path_factory.mktemp("unlike"), **shape)


@pytest.fixture(scope="module")
def smaller(unlike: Path) -> Iterator[LLM]:
    with LLM(unlike) as llm:
        yield llm


def prompts(count: int, size: int = 6) -> list[list[int]]:
    return np.random.default_rng(size).integers(2, TARGET_DIMS.vocab_size, (count, size)).tolist()


@pytest.mark.parametrize(
    ("budget", "rounds", "options"), [(4, 12, {}), (18, 3, {}), (4, 12, {"temperature": 1, "top_k": 20, "seed": 1})]
)
def test_a_perfect_drafter_is_always_accepted(same: LLM, budget: int, rounds: int, options: dict[str, Any]) -> None:
    """Its cache must follow the target's through full acceptance, where the last drafted token was never fed to it. A
    chain that is drafted token by token has no other end than its budget."""
    most = 1 + rounds * (1 + budget)
    params = SamplingParams(method="draft-model", tree_budget=budget, max_tokens=most, ignore_eos=True, **options)
    (output,) = same.generate(PROMPT, params)
    assert output.metrics.acceptance_lengths == [1 + budget] * rounds


def test_what_is_drafted_depends_on_the_committed_tokens_only(smaller: LLM) -> None:
    """After rejections, reuse of a longer prompt's cache and a change of slot, the draft is that of a fresh cache."""
    engine = smaller.engine
    sampler = Sampler(SamplingParams(), TARGET_DIMS.vocab_size, PROMPT, frozenset())

    def draft(slot: int) -> list[int]:
        request = DraftRequest(slot, 11, 1, 5, sampler.draft)
        return marginals(engine.draft([request])[0]).token_ids[:, 0].tolist()

    def fill(slot: int, tokens: list[int]) -> None:
        engine.prefill(slot, np.array(tokens), rows="none", taps=True)

    def fresh(tokens: list[int]) -> list[int]:
        engine.truncate(0, 0)
        fill(0, tokens)
        return draft(0)

    engine.truncate(1, 0)
    fill(1, PROMPT)
    drafted = draft(1)
    accepted = [11, drafted[0], drafted[1]]
    fill(1, [*accepted, 50])  # and the third one rejected
    assert draft(1) == fresh([*PROMPT, *accepted, 50])
    engine.truncate(1, len(PROMPT) + 2)
    assert draft(1) == fresh([*PROMPT, *accepted[:2]])
    engine.truncate(1, len(PROMPT))
    fill(1, [30, 31, 32])
    assert draft(1) == fresh([*PROMPT, 30, 31, 32])
    assert draft(1) == fresh([*PROMPT, 30, 31, 32])


def test_a_seed_repeats_chosen_lengths_whatever_went_between(unlike: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "load_or_measure", lambda *_: CHAINS["small"])
    params = SamplingParams(temperature=1, top_k=3, seed=5, max_tokens=60, ignore_eos=True)
    with LLM(unlike) as llm:
        (first,) = llm.generate(PROMPT, params)
        llm.generate(prompts(4), SamplingParams(max_tokens=200, ignore_eos=True))
        (again,) = llm.generate(PROMPT, params)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.metrics.budgets == first.metrics.budgets
    assert any(first.metrics.budgets)


# Method eagle: an EAGLE-3 drafter over a random target


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
