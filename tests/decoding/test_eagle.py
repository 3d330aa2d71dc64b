"""Method eagle on real engines: an EAGLE-3 drafter over a random target, good, useless or adversarial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, make_eagle, make_target
from languages import Compiler, constrained, letters
from scripted import completion, finish
from truth import FALSE_ALARM, chi_square, distribution

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.eagle3.drafter import Level, Nodes
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.engines import profile
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.profile import measure
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.structured.record import StructuredOutput

PROMPT = [5, 9, 2, 40, 7]
LAYERS = 8


def build(path: Path, *, precision: Any = "auto", backend: Any = "onnxruntime", **drafter: Any) -> Path:
    """An engine of a target with eight layers, whose usual taps the drafter reads."""
    target = make_target(path / "target", num_layers=LAYERS)
    make_eagle(path / "drafter", **drafter)
    request = BuildRequest(
        target="pair",
        checkpoint=target,
        drafter=path / "drafter",
        output=path / "engine",
        precision=precision,
        backend=backend,
        max_batch=3,
    )
    compile_engine(request)
    return path / "engine"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


def prompts(count: int, size: int = 6) -> list[list[int]]:
    return np.random.default_rng(size).integers(2, TARGET_DIMS.vocab_size, (count, size)).tolist()


def tokens(llm: LLM, asked: list[list[int]], **params: Any) -> list[list[int]]:
    found = llm.generate(asked, SamplingParams(max_tokens=40, ignore_eos=True, **params))
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.parametrize("budget", [1, 2, 9, 40, "auto"])
def test_greedy_output_is_that_of_ar(llm: LLM, budget: Any) -> None:
    asked = prompts(7)
    assert tokens(llm, asked, method="eagle", tree_budget=budget) == tokens(llm, asked, method="ar")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_exact_engines_emit_the_bits_of_ar(tmp_path: Path, precision: str) -> None:
    directory = build(tmp_path, precision=precision)
    with LLM(directory, exact=True) as llm:
        asked = prompts(6)
        for budget in (3, 16):
            assert tokens(llm, asked, method="eagle", tree_budget=budget) == tokens(llm, asked, method="ar")


def test_the_torch_backend_drafts_the_same_trees(tmp_path: Path, llm: LLM) -> None:
    pytest.importorskip("torch")
    with LLM(build(tmp_path, backend="torch", precision="fp32")) as other:
        params = SamplingParams(max_tokens=20, ignore_eos=True, method="eagle", tree_budget=12)
        for prompt in prompts(3):
            expected, found = llm.generate([prompt], params)[0], other.generate([prompt], params)[0]
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            assert found.metrics.acceptance_lengths == expected.metrics.acceptance_lengths


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


class Drafts:
    """In place of the drafter's candidates: those of another model of the text, or lies."""

    def __init__(self, kind: str, oracle: OrtEngine, tokens: list[int]) -> None:
        self.kind, self.oracle, self.tokens, self.passes, self.bonus = kind, oracle, tokens, 0, -1

    def level(self, level: Level, paths: list[list[int]]) -> Level:
        self.passes += 1
        rows = [self.row(path, level.log_probs.shape[1]) for path in paths]
        return Level(level.outputs, np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]))

    def row(self, path: list[int], k: int) -> tuple[Any, Any]:
        """The target's own distribution where it is good, its least probable tokens with great confidence where it is
        adversarial, any tokens where it is useless."""
        self.oracle.truncate(0, 0)
        whole = np.array([*self.tokens, *path])
        logits = self.oracle.prefill(0, whole, rows="last", taps=False).logits[-1].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        order = np.argsort(-log_probs)
        if self.kind == "useless":
            order = np.random.default_rng(whole).permutation(len(order))
        falling = np.sort(log_probs)[::-1][:k]
        ids = (order[::-1] if self.kind == "adversarial" else order)[:k]
        return falling.astype(np.float32), ids.astype(np.int32)


@pytest.fixture
def liar(engine: Path) -> Iterator[Callable[[str], tuple[OrtEngine, Drafts]]]:
    """Engines whose drafter's candidates are replaced."""
    opened: list[OrtEngine] = []

    def make(kind: str) -> tuple[OrtEngine, Drafts]:
        manifest = load_manifest(engine)
        both = OrtEngine(engine, manifest), OrtEngine(engine, manifest)
        opened.extend(both)
        drafter: Any = both[0]._drafter
        network, drafts = drafter._network, Drafts(kind, both[1], [])
        absorb, expand = network.absorb, network.expand

        def absorbed(slot: int, token_ids: Any, states: Any, top_k: int) -> Level:
            level = absorb(slot, token_ids, states, top_k)
            drafts.tokens = [*drafter._contexts[slot].tokens]
            drafts.bonus = int(token_ids[-1])
            return drafts.level(level, [[drafts.bonus]])

        def expanded(slot: int, nodes: Nodes, top_k: int) -> Level:
            new = range(nodes.first, len(nodes.token_ids))
            paths = [[drafts.bonus, *nodes.token_ids[nodes.sees[i]].tolist()] for i in new]
            return drafts.level(expand(slot, nodes, top_k), paths)

        network.absorb, network.expand = absorbed, expanded
        return both[0], drafts

    yield make
    for each in opened:
        each.close()


KINDS = ["good", "useless", "adversarial"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_ar_whatever_is_drafted(liar: Any, kind: str) -> None:
    engine, drafts = liar(kind)
    texts = []
    for method in ("ar", "eagle"):
        budget: dict[str, Any] = {"tree_budget": 12} if method == "eagle" else {}
        params = SamplingParams(method=method, **budget, max_tokens=24, temperature=0.0, ignore_eos=True)
        asked = completion(engine, PROMPT, params)
        finish(Scheduler(engine), [asked])
        texts.append(asked.output)
    assert texts[0] == texts[1] and drafts.passes > 0
    taken = asked.metrics.mean_acceptance_length
    assert taken > 4 if kind == "good" else taken < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_targets_distribution(liar: Any, kind: str) -> None:
    engine, drafts = liar(kind)
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 3}
    plain = SamplingParams(**options)

    def joint(output: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(output) == 3:
            return {output: 1.0}
        drafts.oracle.truncate(0, 0)
        verdict = drafts.oracle.prefill(0, np.array([*PROMPT, *output]), rows="last", taps=False)
        row = distribution(verdict.logits[-1].tolist(), plain, PROMPT, output)
        return {k: p * q for t, p in enumerate(row) if p for k, q in joint((*output, t)).items()}

    expected, counts, scheduler = joint(()), Counter[tuple[int, ...]](), Scheduler(engine)
    for seed in range(160):
        params = SamplingParams(method="eagle", tree_budget=6, max_tokens=3, seed=seed, **options)
        asked = completion(engine, PROMPT, params)
        finish(scheduler, [asked])
        counts[tuple(asked.output)] += 1
    assert drafts.passes > 0
    assert chi_square(counts, expected) > FALSE_ALARM


END = TARGET_DIMS.vocab_size - 1
LETTERS = Compiler(letters(TARGET_DIMS.vocab_size), END)
WORDS = StructuredOutput(regex="([a-e]{2,6}|x(y|z)*w)[f-k]{3}(m|n){0,4}(ZZ)?")  # no token has a Z


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9, "min_tokens": 60}])
def test_constrained_output_is_that_of_ar(liar: Any, kind: str, options: dict[str, Any]) -> None:
    """The same tokens, greedy and drawn, also where the constraint ends before min_tokens; nodes that are not allowed
    are not verified."""
    engine, drafts = liar(kind)
    trees: list[Round] = []

    def output(seed: int, **method: Any) -> list[int]:
        params = SamplingParams(max_tokens=60, seed=seed, **method, **options)
        asked = completion(engine, PROMPT, params, eos=[END], sampler=constrained(WORDS, LETTERS))
        asked.on_round = trees.append
        finish(Scheduler(engine), [asked])
        assert asked.finish_reason == ("length" if len(asked.output) == 60 else "stop")
        return asked.output

    for seed in range(2):
        expected = output(seed, method="ar")
        for budget in (2, 12):
            assert output(seed, method="eagle", tree_budget=budget) == expected
    assert drafts.passes > 0
    assert {int(token) for each in trees for token in each.tree.token_ids} <= {*range(26), END}


def test_constrained_draws_have_the_targets_distribution(liar: Any) -> None:
    engine, drafts = liar("good")
    few = constrained(StructuredOutput(regex="(a|b)(c|d)(e|f)"), LETTERS)
    options: dict[str, Any] = {"temperature": 1.0}

    def joint(output: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(output) == 3:
            return {output: 1.0}
        drafts.oracle.truncate(0, 0)
        logits = drafts.oracle.prefill(0, np.array([*PROMPT, *output]), rows="last", taps=False).logits[-1]
        allowed = (2 * len(output), 2 * len(output) + 1)
        row = [float(x) if token in allowed else -np.inf for token, x in enumerate(logits)]
        p = distribution(row, SamplingParams(**options), PROMPT, output)
        return {k: p[t] * q for t in allowed for k, q in joint((*output, t)).items()}

    expected, counts, scheduler = joint(()), Counter[tuple[int, ...]](), Scheduler(engine)
    for seed in range(120):
        params = SamplingParams(method="eagle", tree_budget=6, max_tokens=9, seed=seed, **options)
        asked = completion(engine, PROMPT, params, eos=[END], sampler=few)
        finish(scheduler, [asked])
        counts[tuple(asked.output)] += 1
    assert chi_square(counts, expected) > FALSE_ALARM


def test_levels_of_a_fixed_budget(llm: LLM) -> None:
    """EAGLE's own number."""
    rounds: list[Round] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True, tree_budget=200)
    list(llm.stream(PROMPT, params, on_round=rounds.append))
    assert max(each.tree.depths.max() for each in rounds if len(each.tree) and not each.path[1:].size) == 8


def test_it_is_the_method_of_its_engines(llm: LLM) -> None:
    found = llm.generate([PROMPT], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert found.outputs[0].token_ids
    with pytest.raises(UsageError, match="method 'ddtree' needs a drafter of kind dflash, this engine's is eagle3"):
        llm.generate([PROMPT], SamplingParams(method="ddtree"))
