"""What each rank holds and exchanges, without other processes; and what cannot be split."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import DRAFTER_EXTRA, TARGET_DIMS, dims_of, make_eagle, make_target
from engine_builds import build_torch_engine
from torch import Tensor

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.weight_layout import DRAFTER, stored_weights
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import UsageError
from ddtree_trt.models.families import FAMILIES
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch.parallel.engine import _interrupts_deferred
from ddtree_trt.runtime.engines.torch.parallel.split import Shard, Vocabulary, check_split, cut_of, kv_heads
from ddtree_trt.runtime.llm import LLM


class Rehearsed(Shard):
    """A rank among others that are run one after the other, as often as they exchange something."""

    def __init__(self, rank: int, given: list[list[Tensor]]) -> None:
        """`given`: what each rank has exchanged in earlier runs; this run's first new tensor is added."""
        super().__init__(rank, len(given))
        self._given = given
        self._number = 0

    def gather(self, x: Tensor) -> Tensor:
        mine = self._given[self.rank]
        if self._number == len(mine):
            mine.append(x)
            raise _OthersFirst
        self._number += 1
        return torch.stack([each[self._number - 1] for each in self._given])

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(0)


class _OthersFirst(Exception):
    """The other ranks have to exchange something first."""


def on_all_ranks(size: int, work: Callable[[Shard], Any]) -> list[Any]:
    """The results of `work` on every rank."""
    given: list[list[Tensor]] = [[] for _ in range(size)]
    while True:
        try:
            return [work(Rehearsed(rank, given)) for rank in range(size)]
        except _OthersFirst:
            for rank in range(size):
                if len(given[rank]) < max(map(len, given)):
                    with pytest.raises(_OthersFirst):
                        work(Rehearsed(rank, given))


@pytest.mark.parametrize("size", [1, 3])
def test_a_vocabulary_in_parts_is_the_whole_one(size: int) -> None:
    """Its choices and sums, with ties between ranks, more candidates than a rank has rows, and ids of every rank."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(0, 4, (6, 17), generator=generator).float()  # full of ties
    distinct = torch.randn(6, 17, generator=generator)
    table = torch.randn(17, 4, generator=generator)
    token_ids = torch.arange(17, dtype=torch.int32).reshape(1, 17)

    def work(shard: Shard) -> tuple[Tensor, ...]:
        vocabulary = Vocabulary(17, shard)
        part = slice(vocabulary.start, vocabulary.start + vocabulary.rows)
        best, ids = vocabulary.most_probable(distinct[:, part], 9, kernels=False, normalised=False)
        log_probs, _ = vocabulary.most_probable(distinct[:, part], 9, kernels=False)
        embedded = vocabulary.embed(token_ids, table[part])
        return vocabulary.argmax(logits[:, part]), best, ids, log_probs, embedded, vocabulary.join(distinct[:, part])

    (best, ids), first = distinct.topk(9, -1), torch.from_numpy(logits.numpy().argmax(-1))
    expected = first, best, ids, best - distinct.exp().sum(-1, keepdim=True).log(), table[None], distinct
    for found in on_all_ranks(size, work):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.delta])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_are_each_weight_once(family: str, size: int) -> None:
    dims = dims_of(FAMILIES[family], num_heads=8, num_kv_heads=4)
    drafter = DFlashDims(**{**vars(TARGET_DIMS), **DRAFTER_EXTRA, "num_layers": 2})
    whole = 0
    for weight in stored_weights(dims, drafter, target_tied=False, drafter_tied=True):
        cuts = [cut_of(weight, dims, Shard(rank, size)) for rank in range(size)]
        if weight.name.startswith(DRAFTER) or cuts[0] is None:
            whole += 1
            assert cuts == [None] * size
            continue
        values = np.arange(np.prod(weight.shape)).reshape(weight.shape)
        parts = [cut.read(values, np.concatenate) for cut in cuts if cut is not None]
        assert len({part.shape for part in parts}) == 1
        assert sorted(np.concatenate([part.ravel() for part in parts])) == values.ravel().tolist()
    assert whole > 0


@pytest.mark.parametrize(("heads", "kv", "size"), [(8, 4, 2), (8, 2, 4), (12, 4, 4)])
def test_queries_attend_to_heads_of_their_own_rank(heads: int, kv: int, size: int) -> None:
    dims = dims_of(FAMILIES["qwen3"], num_heads=heads, num_kv_heads=kv)
    for rank in range(size):
        start, end = kv_heads(dims, rank, size)
        mine = range(rank * heads // size, (rank + 1) * heads // size)
        attended = [head // (heads // kv) for head in mine]
        group = len(mine) // (end - start)
        assert attended == [start + place // group for place in range(len(mine))]


def test_an_interrupt_waits_for_the_end_of_a_pass() -> None:
    done = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), _interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)
        assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# Refusals, before any process is started


@pytest.mark.parametrize(
    ("size", "dims", "said"),
    [
        (3, {}, "4 attention heads cannot be divided by 3; sizes that fit: 2, 4"),
        (4, {"num_heads": 12, "num_kv_heads": 6}, "6 heads of keys and values can neither be divided by 4 nor"),
        (2, {"intermediate_size": 51}, "51 columns of its MLP cannot be divided by 2; no other size fits either"),
    ],
)
def test_a_network_that_does_not_divide_is_refused(size: int, dims: dict[str, Any], said: str, directory: Path) -> None:
    manifest = replace(load_manifest(directory), target_dims=dims_of(FAMILIES["qwen3"], **dims))
    with pytest.raises(UsageError, match=said):
        check_split(manifest, size)
    for size in (2, 4, 8, 16):  # few heads of keys and values are for groups of ranks
        check_split(replace(manifest, target_dims=dims_of(FAMILIES["qwen3"], num_heads=16)), size)


def test_other_drafters_are_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafters = {
        "an EAGLE-3 drafter": make_eagle(tmp_path / "eagle", tap_layers=(0, 1, 2)),
        "an autoregressive drafter": make_target(tmp_path / "small", tokenizer=False, num_layers=1),
    }
    for title, drafter in drafters.items():
        directory = tmp_path / f"engine of {title}"
        build_torch_engine(target, drafter, directory, max_batch=2, max_seq_len=96).close()
        with pytest.raises(UsageError, match=f"is for engines with a drafter of blocks, .* has {title}"):
            open_engine(directory, tensor_parallel_size=2)


def test_other_backends_and_options_are_refused(tiny_engine: Path) -> None:
    with pytest.raises(UsageError, match=r"engines of the torch backend, .* is for onnxruntime.*--backend torch"):
        LLM(tiny_engine, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="device_rounds is on, but a split target"):
        LLM(tiny_engine, tensor_parallel_size=2, device_rounds="on")
    with pytest.raises(UsageError, match="tensor_parallel_size must be from 1 to 64, not 65"):
        LLM(tiny_engine, tensor_parallel_size=65)
