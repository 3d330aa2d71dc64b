"""The PyTorch engine beside what numerics and losslessness already say of it: batches, padding, waits, refusals."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_pair
from engine_builds import CHATS, PACKAGED, build_torch_engine

from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.check.run import check_engine
from ddtree_trt.device.buffers import tree_sizes
from ddtree_trt.drafters.dflash.on_torch import BlockDrafter
from ddtree_trt.errors import UsageError
from ddtree_trt.models.families import QWEN3_5
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.graphs import Download
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

TOKENS = 64


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return CHATS[::8]


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


def test_a_round_waits_twice(llm: LLM, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the draft and once for the verification, whatever the number of slots."""
    waits, fetch = list[int](), Download.fetch

    def count(self: Download, size: int) -> Any:
        waits.append(size)
        return fetch(self, size)

    monkeypatch.setattr(Download, "fetch", count)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, method="ddtree", tree_budget=16)
    done = llm.generate(prompts[:1], params)
    assert len(waits) == 2 * done[0].metrics.rounds
    waits.clear()
    done = llm.generate(prompts[:3], params)
    assert len(waits) < 2 * sum(output.metrics.rounds for output in done)


def test_what_a_graph_would_replay_is_all_that_changes(
    directory: Path, prompts: list[Any], plain: list[Any], replayed: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, tokens, positions, masks and slots reach a pass as data at fixed addresses, or the texts would differ:
    sequences of other lengths share graphs, at a GPU's sizes of T."""
    with LLM(directory) as llm:
        engine = llm.engine
        assert isinstance(engine, TorchEngine) and isinstance(engine.drafter, BlockDrafter)
        engine.target.buckets = tree_sizes(engine.limits.max_tokens_per_pass)
        replayed.clear()
        for options in ({"method": "dflash"}, {"method": "ddtree", "tree_budget": 20}):
            assert outputs(llm, prompts, **options) == plain
        sizes = {key[1:] for key in replayed if key[0] == "verify"}
        chain = next(t for t in engine.buckets if t >= engine.manifest.drafting.dims.block_size)
        assert sizes <= {(n, t) for n in (1, 2, 3) for t in (chain, 32)} and (3, 32) in sizes
        assert sum(replayed.values()) > 5 * len(replayed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_hybrid_at_the_sizes_of_a_gpu(precision: str, tmp_path: Path, replayed: Counter[Any]) -> None:
    """Texts of trees are those of `ar`, greedy and drawn, in replayed passes; in bf16 but for ties of its rounding."""
    build_torch_engine(*make_pair(tmp_path, family=QWEN3_5, num_layers=4), tmp_path / "e", precision=precision).close()
    prompts = [[5, 6, 7], [*range(20, 90)], [9]]
    with LLM(tmp_path / "e", threads=1) as llm:
        engine = llm.engine
        assert isinstance(engine, TorchEngine) and engine.rounds is None
        engine.target.buckets = tree_sizes(engine.limits.max_tokens_per_pass)
        for drawn in ({}, {"temperature": 1.0, "seed": 4}):
            expected = outputs(llm, prompts, method="ar", **drawn)
            found = outputs(llm, prompts, method="ddtree", tree_budget=20, **drawn)
            assert found == expected or (precision == "bf16" and _begin_alike(found, expected))
        assert sum(replayed.values()) > 3 * len(replayed)
        with pytest.raises(UsageError, match="states of its target's delta-net layers cannot be cut back"):
            LLM(tmp_path / "e", threads=1, device_rounds="on")


def _begin_alike(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether the texts of a network that knows nothing, whose best tokens are close, go the same way at first."""
    return all(a[:4] == b[:4] for a, b in zip(found, expected, strict=True))


def test_bf16_is_lossless_up_to_its_rounding(tmp_path: Path) -> None:
    engine = build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e", precision="bf16")
    assert engine.target.cache.slab.dtype == torch.bfloat16
    engine.close()
    engine.close()  # again is no error
    settings = CheckSettings(str(tmp_path / "e"), limit=2, max_tokens=24, seeds=0, threads=1)
    report = check_engine(settings)
    assert report.precision == "bf16"
    assert all(finding.passed for finding in report.greedy)
    assert any(finding.tau > 3 for finding in report.greedy)
