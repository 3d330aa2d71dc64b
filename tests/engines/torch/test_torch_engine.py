"""The PyTorch engine beside what numerics and losslessness already say of it: batches, padding, waits, refusals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TARGET_DIMS, make_pair, make_target
from engine_builds import PACKAGED, build_torch_engine
from numerics import Follower, Truth, path_to, random_tree
from plugin_libraries import torch_operators

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.check import check_engine
from ddtree_trt.device.buckets import buckets
from ddtree_trt.errors import ArtifactError, EngineError, MissingDependency
from ddtree_trt.runtime.decoding.latency import fingerprint
from ddtree_trt.runtime.engines.base import DraftRequest, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.lazy_rows import LazyRows
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.attention import KernelAttention, Scratch
from ddtree_trt.runtime.engines.torch.drafters import BlockDrafter
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.graphs import Graphs
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import TokenTree

TOKENS = 64
VOCAB = 2048


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "tiny"
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", path, max_batch=3, max_seq_len=640).close()
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory) as llm:
        yield llm


@pytest.fixture
def engine(directory: Path) -> Iterator[TorchEngine]:
    engine = open_engine(directory, threads=1)
    assert isinstance(engine, TorchEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    rows = (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(row)["prompt"]}] for row in rows[::8]]


# Losslessness


def outputs(llm: LLM, prompts: list[Any], **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return outputs(llm, prompts, method="ar")


def test_ar_says_what_the_onnxruntime_engine_says(tiny_engine: Path, prompts: list[Any], plain: list[Any]) -> None:
    with LLM(tiny_engine) as other:
        assert outputs(other, prompts, method="ar") == plain


@pytest.mark.parametrize(
    ("method", "budget"), [("dflash", "auto"), ("ddtree", 1), ("ddtree", 16), ("ddtree", 100), ("ddtree", "auto")]
)
def test_greedy_output_is_that_of_ar(llm: LLM, prompts: list[Any], plain: list[Any], method: str, budget: Any) -> None:
    """Slots of different lengths share every pass: there are more prompts than slots."""
    assert len(prompts) > llm.engine.manifest.limits.max_batch
    assert outputs(llm, prompts, method=method, tree_budget=budget) == plain


def test_draws_are_those_of_ar(llm: LLM, prompts: list[Any]) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": 1}
    expected = outputs(llm, prompts[:3], method="ar", **options)
    assert outputs(llm, prompts[:3], method="ddtree", tree_budget=16, **options) == expected


def test_a_round_waits_twice(llm: LLM, prompts: list[Any]) -> None:
    """Once for the draft and once for the verification, whatever the number of slots."""
    engine = llm.engine
    assert isinstance(engine, TorchEngine)
    before = engine.waits
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, method="ddtree", tree_budget=16)
    done = llm.generate(prompts[:1], params)
    assert engine.waits - before == 2 * done[0].metrics.rounds
    before = engine.waits
    done = llm.generate(prompts[:3], params)
    assert engine.waits - before < 2 * sum(output.metrics.rounds for output in done)


def test_settling_waits_for_a_gpu_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waited = llm.engine, []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    engine.settle()
    assert not waited
    monkeypatch.setattr(engine, "device", torch.device("cuda", 0))
    engine.settle()
    assert waited == [True]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Stages as CUDA graphs would run them: for equal keys always the first call's work, on the first call's tensors.
    Counts the runs of each."""
    works: dict[Any, Any] = {}
    runs: Counter[Any] = Counter()

    def run(self: Graphs, key: Any, work: Any) -> None:
        works.setdefault((self, key), work)()
        runs[self, key] += 1

    monkeypatch.setattr(Graphs, "run", run)
    return runs


def test_what_a_graph_would_replay_is_all_that_changes(
    directory: Path, prompts: list[Any], plain: list[Any], replayed: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, tokens, positions, masks and slots reach a pass as data at fixed addresses, or the texts would differ:
    sequences of other lengths share graphs, at a GPU's sizes of T."""
    with LLM(directory) as llm:
        engine = llm.engine
        assert isinstance(engine, TorchEngine) and isinstance(engine.drafter, BlockDrafter)
        engine.buckets = buckets(engine.limits.max_tokens_per_pass)
        replayed.clear()
        for options in ({"method": "dflash"}, {"method": "ddtree", "tree_budget": 20}):
            assert outputs(llm, prompts, **options) == plain
        sizes = {key for graphs, key in replayed if graphs is engine.graphs}
        chain = next(t for t in engine.buckets if t >= engine.manifest.dflash.block_size)
        assert sizes <= {(n, t) for n in (1, 2, 3) for t in (chain, 32)} and (3, 32) in sizes
        assert sum(replayed.values()) > 5 * len(replayed)


def test_bf16_is_lossless_up_to_its_rounding(tmp_path: Path) -> None:
    engine = build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16")
    assert engine.cache.slab.dtype == torch.bfloat16
    engine.close()
    engine.close()  # again is no error
    settings = CheckSettings(str(tmp_path / "e"), limit=3, max_tokens=32, seeds=0, threads=1)
    report = check_engine(settings)
    assert report.precision == "bf16"
    assert all(finding.passed for finding in report.greedy)
    assert any(finding.tau > 3 for finding in report.greedy)


def test_an_autoregressive_drafter(tmp_path: Path) -> None:
    """The target itself drafts: always accepted, and the output is that of ar."""
    target = make_target(tmp_path / "t")
    drafter = make_target(tmp_path / "d", tokenizer=False)
    build_torch_engine(target, drafter, tmp_path / "e").close()
    params: dict[str, Any] = {"max_tokens": 1 + 5 * 8, "ignore_eos": True}
    prompt = [5, 9, 2, 40, 7]
    with LLM(tmp_path / "e") as llm:
        (expected,) = llm.generate(prompt, SamplingParams(method="ar", **params))
        (found,) = llm.generate(prompt, SamplingParams(method="draft-model", tree_budget=4, **params))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.metrics.acceptance_lengths == [5] * 8


# Batches and padding


def fill(engine: TorchEngine, lengths: tuple[int, ...], seed: int = 0) -> None:
    for slot, length in enumerate(lengths):
        engine.truncate(slot, 0)
        tokens = np.random.default_rng([seed, slot]).integers(5, VOCAB, length)
        for start in range(0, length, 256):
            engine.prefill(slot, tokens[start : start + 256], rows="none", taps=True)


def refuse_to_draw(*_: object) -> Any:
    raise AssertionError("a block drafter draws nothing")


def drafted(engine: TorchEngine, slots: tuple[int, ...]) -> dict[int, Any]:
    requests = [DraftRequest(slot, 7 + slot, 20, 8, refuse_to_draw) for slot in slots]
    return dict(zip(slots, engine.draft(requests), strict=True))


def commit(engine: TorchEngine, trees: dict[int, TokenTree]) -> None:
    """Keep the way to each tree's last node."""
    for slot, tree in trees.items():
        engine.commit(slot, path_to(tree, len(tree) - 1), taps=True)


def copied(verdict: Verdict) -> Verdict:
    return Verdict(verdict.choices.copy(), np.array(verdict.logits))


def verified(engine: TorchEngine, trees: dict[int, TokenTree]) -> dict[int, Verdict]:
    said = engine.verify([VerifyRequest(slot, tree) for slot, tree in trees.items()])
    return {slot: copied(verdict) for slot, verdict in zip(trees, said, strict=True)}


def assert_equal(found: Verdict, expected: Verdict) -> None:
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-4)
    np.testing.assert_array_equal(found.choices, expected.choices)


def test_slots_of_one_pass_are_what_they_are_alone(engine: TorchEngine) -> None:
    """Own lengths, own trees of other sizes, paths that move rows, and rounds after them."""
    rng = np.random.default_rng(4)
    lengths, slots = (3, 300, 40), (0, 1, 2)
    rounds = [{slot: random_tree(rng, size, VOCAB) for slot, size in zip(slots, sizes, strict=True)}
              for sizes in ((10, 1, 70), (40, 33, 2), (5, 6, 7))]  # fmt: skip
    together, alone = [], []
    fill(engine, lengths)
    for trees in rounds:
        together.append((drafted(engine, slots), verified(engine, trees)))
        commit(engine, trees)
    fill(engine, lengths)
    for trees in rounds:
        drafts: dict[int, Any] = {}
        verdicts: dict[int, Verdict] = {}
        for slot, tree in trees.items():
            drafts |= drafted(engine, (slot,))
            verdicts |= verified(engine, {slot: tree})
            commit(engine, {slot: tree})
        alone.append((drafts, verdicts))
    for (drafts, verdicts), (drafts_alone, verdicts_alone) in zip(together, alone, strict=True):
        for slot in slots:
            assert_equal(verdicts[slot], verdicts_alone[slot])
            np.testing.assert_allclose(drafts[slot].log_probs, drafts_alone[slot].log_probs, atol=2e-4)


def test_a_draft_has_the_candidates_that_were_asked_for(engine: TorchEngine) -> None:
    """Whatever number the graph was captured for; those of several requests come from one pass."""
    fill(engine, (9, 12))

    def draft(*top_ks: int) -> list[Any]:
        return engine.draft([DraftRequest(s, 5, k, 8, refuse_to_draw) for s, k in enumerate(top_ks)])

    whole, length = draft(VOCAB, 1), engine.manifest.dflash.block_size - 1
    for top_ks in ((1, 1), (7, 70), (1500, 3), (9999, 2)):
        for n, (found, k) in enumerate(zip(draft(*top_ks), top_ks, strict=True)):
            assert found.log_probs.shape == found.token_ids.shape == (length, min(k, VOCAB))
            if n == 0:
                np.testing.assert_allclose(found.log_probs, whole[0].log_probs[:, :k], atol=1e-5)
            assert (np.diff(found.log_probs) <= 0).all()


def test_a_pass_longer_than_any(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="a pass of 258 tokens is longer than the 257 this engine was made for"):
        engine.prefill(0, np.ones(258, np.int64), rows="none", taps=True)


def test_states_of_an_earlier_pass_are_gone(engine: TorchEngine) -> None:
    rng = np.random.default_rng(0)
    fill(engine, (4, 5))
    tree = random_tree(rng, 5, VOCAB)
    verified(engine, {0: tree})
    verified(engine, {1: tree})
    with pytest.raises(EngineError, match="slot 0 was not in the last target pass"):
        commit(engine, {0: tree})


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """The padded sizes of a GPU, on the CPU: logits, states told to the drafter and later rounds are the truth's."""
    target, drafter = make_pair(tmp_path, max_positions=512)
    engine = build_torch_engine(target, drafter, tmp_path / "engine", max_batch=2)
    engine.buckets = buckets(engine.limits.max_tokens_per_pass)
    truth = Truth(target, engine.manifest.dflash.tap_layers)
    followers = [Follower(engine, slot, truth) for slot in range(2)]
    rng = np.random.default_rng(2)
    for follower, length in zip(followers, (6, 50), strict=True):
        follower.prefill(rng.integers(0, TARGET_DIMS.vocab_size, length))
    for sizes in ((10, 21), (3, 5), (1, 9)):
        trees = [random_tree(rng, n, TARGET_DIMS.vocab_size) for n in sizes]
        requests = [f.request(tree) for f, tree in zip(followers, trees, strict=True)]
        for follower, verdict in zip(followers, engine.verify(requests), strict=True):
            follower.check(verdict)
        for follower, tree in zip(followers, trees, strict=True):
            follower.commit(path_to(tree, len(tree) - 1))


def test_a_single_sequence_finds_every_graph_captured(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: opening runs each of its stages once, so that a first request captures none of them."""
    captured: set[tuple[int, Any]] = set()
    run = Graphs.run

    def record(self: Graphs, key: Any, work: Any) -> None:
        captured.add((id(self), key))
        run(self, key, work)

    monkeypatch.setattr(Graphs, "run", record)
    limits, device = engine.limits, engine.device
    sizes = buckets(limits.max_tokens_per_pass)
    monkeypatch.setattr(engine, "buckets", sizes)
    engine.warm_up()
    assert not captured  # a CPU captures nothing
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    engine.warm_up()
    monkeypatch.setattr(engine, "device", device)
    before = set(captured)
    largest = next(size for size in sizes if size > limits.max_tree_budget)
    assert {key for graphs, key in captured if graphs == id(engine.graphs)} == {
        (1, size) for size in sizes if size <= largest
    }
    assert not any(engine.length(slot) or engine.draftable_length(slot) for slot in range(limits.max_batch))
    fill(engine, (30,))
    for size in (1, 2, 7, 40, limits.max_tree_budget + 1):
        request = DraftRequest(0, 5, min(size, limits.max_tree_budget), 7, lambda *_: pytest.fail("draws nothing"))
        engine.draft([request])
        engine.verify([VerifyRequest(0, random_tree(np.random.default_rng(size), size, VOCAB))])
    assert captured == before


def test_buckets_rise_to_the_largest_pass() -> None:
    for largest in (1, 2, 5, 16, 17, 65, 257, 1025):
        steps = buckets(largest)
        assert steps[-1] == largest and steps[0] == 1 and steps == sorted(set(steps))


def test_the_kernels_are_called_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine as it runs on a GPU, but for the graphs: the operators are the kernels' own source on the CPU."""
    library = torch_operators()
    monkeypatch.setattr(torch_attention, "find", lambda name: library)
    plain = build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16", max_batch=2)
    torch_attention.load_operators()
    monkeypatch.setattr(
        "ddtree_trt.runtime.engines.torch.engine.attention_for", lambda *given: KernelAttention(given[-1])
    )
    kernels = open_engine(tmp_path / "e")
    assert isinstance(kernels, TorchEngine) and kernels.cache._kernels
    rng = np.random.default_rng(1)
    for engine in (plain, kernels):
        fill(engine, (9, 70))
    for sizes in ((10, 33), (5, 2)):
        trees = {slot: random_tree(rng, size, VOCAB) for slot, size in enumerate(sizes)}
        for draft, other in zip(*(drafted(e, (0, 1)).values() for e in (plain, kernels)), strict=True):
            np.testing.assert_allclose(draft.log_probs[:, 0], other.log_probs[:, 0], atol=0.5)
        expected, found = verified(plain, trees), verified(kernels, trees)
        for slot in trees:
            scale = np.abs(expected[slot].logits).max()
            np.testing.assert_allclose(found[slot].logits, expected[slot].logits, atol=0.03 * scale)
        for engine in (plain, kernels):
            commit(engine, trees)


# Refusals


def test_torch_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[torch\]'"):
        open_engine(directory)


def test_fp16_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"fp16, which is for GPUs.*--backend torch --precision fp32"):
        build_torch_engine(*make_pair(tmp_path), tmp_path / "engine", precision="fp16")


def test_kernels_missing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise MissingDependency(f"{name} is not built")

    monkeypatch.setattr(torch_attention, "find", missing)
    monkeypatch.setattr(torch.ops, "ddtree", object())
    cuda, scratch = torch.device("cuda"), Scratch(0, torch.device("cpu"))
    with pytest.raises(MissingDependency, match="libddtree_torch"):
        torch_attention.attention_for(cuda, torch.bfloat16, 128, scratch)
    assert not torch_attention.attention_for(cuda, torch.float32, 128, scratch).kernels


PRODUCTS = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
PRODUCTS += ["allow_tf32", "allow_fp16_accumulation"]


@pytest.fixture
def products() -> Iterator[Any]:
    """PyTorch's settings of matrix products on a GPU, all loose."""
    settings = torch.backends.cuda.matmul
    before = {name: getattr(settings, name) for name in PRODUCTS}
    for name in PRODUCTS:
        setattr(settings, name, True)
    yield settings
    for name, value in before.items():
        setattr(settings, name, value)


def test_sums_of_products_stay_single_on_a_gpu(directory: Path, products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening on a GPU turns off what PyTorch leaves on: sums of a product's parts in half precision."""
    built = load_manifest(directory)
    TorchEngine.open(directory, built).close()
    assert all(getattr(products, name) for name in PRODUCTS)  # a CPU engine leaves the process alone
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.choose_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.check_device", lambda *_: None)
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.read_weights", lambda *_: {})
    with pytest.raises((AssertionError, RuntimeError)):  # there is no GPU to go on with
        TorchEngine.open(directory, built)
    assert not any(getattr(products, name) for name in PRODUCTS)


def test_a_weight_file_of_another_model(tmp_path: Path) -> None:
    """What digests cannot see: a manifest and a weight file that both are whole and do not belong together."""
    pair = make_pair(tmp_path / "a")
    build_torch_engine(*pair, tmp_path / "engine").close()
    manifest = load_manifest(tmp_path / "engine")
    for changes in ({"num_layers": 2}, {"intermediate_size": 40}):
        dims = type(manifest.target_dims)(**{**vars(manifest.target_dims), **changes})
        other = type(manifest)(**{**vars(manifest), "target_dims": dims})
        with pytest.raises(ArtifactError, match="rebuild with: ddtree-trt build"):
            TorchEngine.open(tmp_path / "engine", other)


# Parts


def test_a_profile_is_of_one_device(engine: TorchEngine, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine directory may run on a CPU and on GPUs of several kinds."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.device_name", lambda device: "some GPU")
    other = TorchEngine.open(directory, load_manifest(directory), threads=1)
    assert fingerprint(engine.manifest, engine.threads) != fingerprint(other.manifest, engine.threads)


def test_greedy_decoding_reads_no_logits(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rows come over for requests that want logprobs, and for the prompt's last token."""
    from scripted import completion, finish

    from ddtree_trt.runtime.scheduler import Scheduler

    fetched: list[int] = []

    def lazy(logits: torch.Tensor) -> Any:
        def fetch(start: int, stop: int) -> Any:
            fetched.append(stop - start)
            return logits[start:stop].numpy().copy()

        rows, vocabulary = logits.shape
        return LazyRows(rows, vocabulary, fetch)

    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine._readable", lazy)
    for logprobs, expected in ((None, [1]), (1, [1] * 20)):
        params = SamplingParams(max_tokens=20, ignore_eos=True, method="ddtree", tree_budget=8, logprobs=logprobs)
        fetched.clear()
        finish(Scheduler(engine), [completion(engine, [5, 6, 7], params)])
        assert fetched == expected
