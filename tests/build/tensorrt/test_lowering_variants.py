"""Drafters with windows, causal layers and tables of their own, lowered to TensorRT and run by ONNX Runtime, against
PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_target, make_variant, reading_variant
from dflash_truth import DFlash
from engine_files import make_manifest
from lowered import LoweredPair
from numerics import Truth, assert_close, path_to, random_tree

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.files import SHARED_WEIGHTS
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt.backend import TensorRtBuild
from ddtree_trt.build.backends.tensorrt.plans import write_shared
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.device.buffers import DRAFTER_EMBEDDING, DRAFTER_HEAD, tensorrt_buffers
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.plugins import library
from ddtree_trt.runtime.engines.tensorrt.opening import Tables

WINDOW = 12
LIMITS = Limits(max_seq_len=128, max_batch=2, max_tree_budget=40, prefill_chunk=48)
SHAPE: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 256}
OWN = {"own_embedding": True, "own_head": True, "draft_vocab_size": 40}
BOTH: dict[str, dict[str, Any]] = {
    "causal": {"causal": (True, True)},
    "one causal layer": {"causal": (False, True), "block_size": 8},
    "anchor first": {"anchor_first": True, "block_size": 7},
    "own tables": OWN,
    "own embedding": {"own_embedding": True},
}
NATIVE: dict[str, dict[str, Any]] = {
    "windows": {"windows": (WINDOW, WINDOW)},
    "a window below the block": {"windows": (3, 0), "block_size": 8},
    "causal windows": {"causal": (True, True), "windows": (WINDOW, 3), "block_size": 8},
    "mixed": {
        "num_layers": 5,
        "windows": (WINDOW, 0, WINDOW, 5, 0),
        "causal": (True, True, False, True, False),
        "anchor_first": True,
        **OWN,
    },
}
CASES = [
    *(pytest.param(PluginGraph, fields, id=f"plugin-{name}") for name, fields in BOTH.items()),
    *(pytest.param(NativeGraph, fields, id=f"native-{name}") for name, fields in {**BOTH, **NATIVE}.items()),
]


def load_pair(path: Path, fields: dict[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    """A target and a drafter with these features, in the directories `target` and `drafter`."""
    target = make_target(path / "target", tied=False, **SHAPE)
    dims = make_variant(path / "drafter", **{**SHAPE, **fields})
    with reading_variant(path / "drafter", dims):
        return load_checkpoint(target), load_checkpoint(path / "drafter")


@pytest.mark.parametrize(("lowering", "fields"), CASES)
def test_rounds(lowering: type[TensorRtGraph], fields: dict[str, Any], tmp_path: Path) -> None:
    """Contexts that end before, at and behind a window's edge, over rounds of uneven length and two slots at once."""
    pair = load_pair(tmp_path, fields)
    dims = pair[1].dims
    lowered = LoweredPair(tmp_path / "graphs", *pair, LIMITS, "float32", lowering)
    truth, rng = Truth(tmp_path / "target", pair[1].kind.tap_layers), np.random.default_rng(8)
    dflash = DFlash(tmp_path / "drafter", dims, truth)  # type: ignore[arg-type]
    texts = {0: rng.integers(0, 90, WINDOW - 1).tolist(), 1: rng.integers(0, 90, WINDOW).tolist()}
    for slot, tokens in texts.items():
        lowered.prefill(slot, np.array(tokens))

    def draft(*slots: int) -> None:
        log_probs, ids = lowered.draft(slots, bonus=5)
        for n, slot in enumerate(slots):
            expected = dflash(truth(texts[slot])[1], 5)
            assert log_probs[n].shape[0] == pair[1].kind.longest_draft
            assert_close(log_probs[n], -np.sort(-expected, axis=-1)[:, : log_probs.shape[-1]], f"draft in slot {slot}")
            assert_close(log_probs[n], np.take_along_axis(expected, ids[n], axis=-1), f"slot {slot}, by token")

    draft(0)
    draft(1)
    for nodes in (1, 12, 7):
        tree = random_tree(rng, 12, 96)
        path = path_to(tree, nodes - 1)
        lowered.verify(dict.fromkeys(texts, tree))
        for slot, tokens in texts.items():
            lowered.commit(slot, path)
            tokens += tree.token_ids[path].tolist()
        draft(1, 0)


def test_windows_take_native_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plugin has no windows: it is refused by name, and what chooses for the user takes TensorRT's own layers."""
    monkeypatch.setattr(library, "find", lambda name: tmp_path / name)
    networks = [load_pair(tmp_path / name, fields) for name, fields in {**NATIVE, "plain": {}}.items()]
    *windowed, plain = [(target.dims, drafter.dims) for target, drafter in networks]
    with_plugin, either = (TensorRtBuild(BuilderOptions(attention=a)) for a in ("plugin", "auto"))
    with_plugin.check(plain, "bf16")
    assert either.attention(plain) == "plugin"
    for pair in windowed:
        with pytest.raises(UsageError, match="the drafter's sliding windows have no kernel; use --attention native"):
            with_plugin.check(pair, "bf16")
        either.check(pair, "bf16")
        assert either.attention(pair) == "native"


@pytest.mark.parametrize(
    ("fields", "own"),
    [({}, {}), (OWN, {names.EMBEDDING, names.HEAD}), ({"own_head": True}, {names.HEAD})],
    ids=["none", "both", "head"],
)
def test_a_drafters_own_tables_lie_beside_the_targets(fields: dict[str, Any], own: set[str], tmp_path: Path) -> None:
    target, drafter = load_pair(tmp_path, fields)
    write_shared(tmp_path / SHARED_WEIGHTS, target, drafter, "bf16", no_progress)
    manifest = make_manifest(
        backend="tensorrt", precision="bf16", target_dims=target.dims, drafter_dims=drafter.dims, limits=LIMITS
    )
    tables = {names.EMBEDDING, names.HEAD, *(names.DRAFTER + name for name in own)}
    assert Tables(tmp_path, manifest).sources == {name: name for name in tables}
    sizes = tensorrt_buffers(target.dims, drafter.dims, LIMITS, 2)
    rows = drafter.kind.own_tables[-1].shape[0] if own else 0
    assert sizes.get(DRAFTER_HEAD, 0) == rows * 32 * 4 and (DRAFTER_EMBEDDING in sizes) == (names.EMBEDDING in own)
    other = make_manifest(backend="tensorrt", precision="bf16", target_dims=target.dims, drafter_dims=target.dims)
    with pytest.raises(ArtifactError, match="drafter"):
        Tables(tmp_path, other)
