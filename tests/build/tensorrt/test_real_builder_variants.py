"""Drafters with windows, causal layers and tables of their own through the real builder of TensorRT for RTX: no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_drafter, make_target, make_variant, reading_variant
from real_builder import RealBuilder, rtx
from real_graphs import DIMS, LIMITS, ONE_SLOT, TAPS, Graphs

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.backends.tensorrt.profiles import drafter_sizes
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.graph.lowering_native import NativeGraph
from ddtree_trt.build.graph.ops import Sink

pytestmark = pytest.mark.rtx
OWN = {"own_embedding": True, "own_head": True, "draft_vocab_size": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "windows and causal": {"windows": (12, 3), "causal": (True, False)},
    "own tables": {**OWN, "anchor_first": True},
    "mixed": {
        "num_layers": 5,
        "windows": (12, 0, 12, 5, 0),
        "causal": (True, True, False, True, False),
        **OWN,
    },
}


def test_a_drafter_in_bf16_beside_a_target_in_fp16(tmp_path: Path) -> None:
    """Tapped states and embeddings come in the target's type, caches are of the drafter's."""
    target = load_checkpoint(make_target(tmp_path / "t", **DIMS))
    drafter = load_checkpoint(make_drafter(tmp_path / "d", **{**DIMS, **TAPS}))

    def lowering(name: str, sink: Sink, floats: str) -> NativeGraph:
        return NativeGraph(name, sink, "bfloat16", floats)

    graph = Graphs(tmp_path, lowering, "float16").drafter(drafter, target)  # type: ignore[arg-type]
    network = RealBuilder().build(*graph, drafter_sizes(LIMITS, drafter.kind.block_size))
    types = {network.get_input(i).name: network.get_input(i).dtype for i in range(network.num_inputs)}
    halves = rtx().DataType.HALF, rtx().DataType.BF16
    assert (types[names.TAPS], types[names.EMBEDDING], types["past_key.0"]) == (halves[0], halves[0], halves[1])


@pytest.mark.parametrize("limits", [LIMITS, ONE_SLOT], ids=["slots", "one-slot"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_plans(fields: dict[str, Any], limits: Limits, tmp_path: Path) -> None:
    """A plan whose attentions are fused under their masks, and whose outputs have the width of the drafter's head."""
    target = load_checkpoint(make_target(tmp_path / "t", tied=False, **DIMS))
    dims = make_variant(tmp_path / "d", **{**DIMS, **TAPS, **fields})
    with reading_variant(tmp_path / "d", dims):
        drafter = load_checkpoint(tmp_path / "d")
    graph = Graphs(tmp_path, NativeGraph, "bfloat16", limits).drafter(drafter, target)
    network = RealBuilder().build(*graph, drafter_sizes(limits, dims.block_size))
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    assert inputs[names.HEAD] == (dims.head_size, dims.hidden_size)
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    assert tuple(outputs[names.CANDIDATES].shape)[1] == dims.draft_length
    assert outputs[names.CANDIDATES].dtype == rtx().DataType.INT32
