"""Passes of the PyTorch engine: several slots at once, padding, graphs, and what is left of an earlier pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import BY_SWITCHES, make_pair
from drafts import marginals
from engine_builds import PACKAGED, build_torch_engine
from numerics import path_to, random_tree

from ddtree_trt.device.buffers import CANDIDATES, tree_sizes
from ddtree_trt.drafters.dflash.on_torch import BlockDrafter
from ddtree_trt.errors import EngineError
from ddtree_trt.models.families import QWEN3_5
from ddtree_trt.runtime.engines.base import DraftRequest, RoundRequest, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.graphs import Graphs
from ddtree_trt.runtime.engines.torch.products import Products, Weight
from ddtree_trt.runtime.engines.torch.target import TargetPass
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import TokenTree

VOCAB = 2048


# Batches and padding


def fill(engine: TorchEngine, lengths: tuple[int, ...], seed: int = 0) -> None:
    for slot, length in enumerate(lengths):
        engine.truncate(slot, 0)
        vocabulary = engine.manifest.target_dims.vocab_size
        tokens = np.random.default_rng([seed, slot]).integers(5, vocabulary, length)
        for start in range(0, length, 256):
            engine.prefill(slot, tokens[start : start + 256], rows="none", taps=True)


def drafted(engine: TorchEngine, slots: tuple[int, ...]) -> dict[int, Any]:
    requests = [DraftRequest(slot, 7 + slot, 20, 8) for slot in slots]
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


@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_has_the_candidates_that_were_asked_for(
    engine: TorchEngine, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever numbers the graph was captured for; those of several requests come from one pass."""
    monkeypatch.setattr(engine.drafter, "top_ks", CANDIDATES if captured else None)
    fill(engine, (9, 12))

    def draft(*asked: tuple[int, int]) -> list[Any]:
        return engine.draft([DraftRequest(s, 5, k, length) for s, (k, length) in enumerate(asked)])

    longest = engine.manifest.drafting.dims.draft_length
    whole = marginals(draft((VOCAB, longest), (1, 1))[0]).log_probs
    for asked in (((1, 1), (1, 2)), ((7, 3), (70, 1)), ((1500, 4), (3, longest)), ((9999, longest + 1), (2, 5))):
        for n, (found, (k, length)) in enumerate(zip(map(marginals, draft(*asked)), asked, strict=True)):
            k, length = min(k, VOCAB), min(length, longest)
            assert found.log_probs.shape == found.token_ids.shape == (length, k)
            if n == 0:
                np.testing.assert_allclose(found.log_probs, whole[:length, :k], atol=1e-5)
            assert (np.diff(found.log_probs) <= 0).all()


def test_the_head_is_read_for_positions_that_trees_reach(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rounds on the host; on the device by the next of few numbers, of trees of twice the size where they are looked
    at."""
    rows: list[int] = []

    class Recorded(Products):
        def logits(self, hidden: torch.Tensor, head: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
            rows.append(len(hidden))
            return super().logits(hidden, head, out)

    assert isinstance(engine.drafter, BlockDrafter)
    monkeypatch.setattr(engine.drafter.model, "_product", Recorded())
    fill(engine, (9, 12))
    longest = engine.manifest.drafting.dims.draft_length
    for nodes, reach in ((1, 1), (3, 3), (2 * longest, longest)):
        engine.draft([DraftRequest(slot, 5, nodes, nodes) for slot in (0, 1)])
        assert rows and set(rows) == {2 * reach}
        rows.clear()
        assert engine.rounds is not None
        for looks, wanted in ((False, nodes), (True, 2 * nodes)):
            engine.rounds.launch([RoundRequest(slot, 5, nodes, looks=looks) for slot in (0, 1)])
            engine.rounds.read()
            assert rows == [2 * next(r for r in (3, 7, longest) if min(wanted, longest) <= r)]
            rows.clear()


def test_a_pass_longer_than_any(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="a pass of 258 tokens is longer than the 257 this engine was made for"):
        engine.prefill(0, np.ones(258, np.int64), rows="none", taps=True)


def test_a_single_sequence_finds_every_graph_captured(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: opening runs each of its stages once, so that a first request captures none of them."""
    captured: set[Any] = set()
    run = Graphs.run

    def record(self: Graphs, key: Any, work: Any) -> None:
        captured.add(key)
        run(self, key, work)

    monkeypatch.setattr(Graphs, "run", record)
    limits, device = engine.limits, engine.device
    sizes = tree_sizes(limits.max_tokens_per_pass)
    monkeypatch.setattr(engine.target, "buckets", sizes)
    monkeypatch.setattr(engine.drafter, "top_ks", CANDIDATES)
    engine.warm_up()
    assert not captured  # a CPU captures nothing
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    engine.warm_up()
    monkeypatch.setattr(engine, "device", device)
    before = set(captured)
    largest = next(size for size in sizes if size > limits.max_tree_budget)
    assert {key for key in captured if key[0] == "verify"} == {("verify", 1, size) for size in sizes if size <= largest}
    assert not any(engine.length(slot) or engine.draftable(slot, 99) for slot in range(limits.max_batch))
    fill(engine, (30,))
    for size in (1, 2, 7, 40, limits.max_tree_budget + 1):
        nodes = min(size, limits.max_tree_budget)
        engine.draft([DraftRequest(0, 5, nodes, nodes)])
        engine.verify([VerifyRequest(0, random_tree(np.random.default_rng(size), size, VOCAB))])
    assert captured == before


@pytest.mark.parametrize(("pair", "error"), [("packaged", 0.03), *((f, 0.05) for f in (*BY_SWITCHES, "hybrid"))])
def test_the_kernels_are_called_right(
    pair: str, error: float, open_on_kernels: Callable[[Path], TorchEngine], tmp_path: Path
) -> None:
    """Logits and drafts are those of plain PyTorch in the same precision, within its rounding. What the fused kernels
    do not have, in families without norms of queries and keys, runs in PyTorch beside them."""
    folders = PACKAGED / "target", PACKAGED / "drafter"
    if pair != "packaged":
        folders = make_pair(tmp_path, family={**BY_SWITCHES, "hybrid": QWEN3_5}[pair], head_dim=64, max_positions=512)
    plain = build_torch_engine(*folders, tmp_path / "e", precision="bf16", max_batch=2)
    kernels, rng = open_on_kernels(tmp_path / "e"), np.random.default_rng(1)
    for engine in (plain, kernels):
        fill(engine, (9, 70))
    for sizes in ((10, 33), (5, 2)):
        trees = {s: random_tree(rng, size, plain.manifest.target_dims.vocab_size) for s, size in enumerate(sizes)}
        for draft, other in zip(*(drafted(e, (0, 1)).values() for e in (plain, kernels)), strict=True):
            np.testing.assert_allclose(marginals(draft).log_probs[:, 0], marginals(other).log_probs[:, 0], atol=0.5)
        expected, found = verified(plain, trees), verified(kernels, trees)
        for slot in trees:
            scale = np.abs(expected[slot].logits).max()
            np.testing.assert_allclose(found[slot].logits, expected[slot].logits, atol=error * scale)
        for engine in (plain, kernels):
            commit(engine, trees)


def test_greedy_decoding_reads_no_logits(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are copied for logprobs; of the prompt's last row one value, to see that it is finite."""
    from scripted import completion, finish

    from ddtree_trt.runtime.scheduler import Scheduler

    fetched: list[int] = []
    read = TargetPass.read

    def record(*given: Any) -> torch.Tensor:
        found = read(*given)
        fetched.append(found.numel())
        return found

    monkeypatch.setattr(TargetPass, "read", record)
    whole = engine.manifest.target_dims.vocab_size
    for logprobs, expected in ((None, [1]), (1, [1, *[whole] * 20])):
        params = SamplingParams(max_tokens=20, ignore_eos=True, method="ddtree", tree_budget=8, logprobs=logprobs)
        fetched.clear()
        finish(Scheduler(engine), [completion(engine, [5, 6, 7], params)])
        assert fetched == expected


def test_logits_of_many_rows_take_no_more_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed part by part, and again where they are read: of trees that parts cut, and of a prompt."""
    rng = np.random.default_rng(2)
    trees = {slot: random_tree(rng, size, VOCAB) for slot, size in enumerate((33, 40, 21))}
    found: list[dict[int, Verdict]] = []
    for most in (200, 16):
        monkeypatch.setattr("ddtree_trt.device.buffers.round_rows", lambda tokens, most=most: most)
        engine = open_engine(directory, threads=1)
        assert isinstance(engine, TorchEngine) and engine.target.logits.shape == (most, VOCAB)
        fill(engine, (9, 12, 30))
        found.append(verified(engine, trees))
        commit(engine, trees)
        found[-1][3] = copied(engine.prefill(0, np.full(50, 7), rows="all", taps=True))
        engine.close()
    for slot, whole in found[0].items():
        assert found[1][slot].choices.tolist() == whole.choices.tolist() == np.argmax(whole.logits, 1).tolist()
        np.testing.assert_allclose(found[1][slot].logits, whole.logits, atol=1e-4)
