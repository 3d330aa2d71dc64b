"""Quantised checkpoints through TensorRT's real parser and builder, those of TensorRT for RTX: no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_target
from quantized import quantize
from real_builder import RealBuilder
from real_graphs import DIMS, LIMITS, Graphs

from ddtree_trt.build.backends.tensorrt.profiles import target_sizes
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.graph.lowering_native import NativeGraph
from ddtree_trt.build.graph.lowering_plugin import PluginGraph
from ddtree_trt.build.graph.lowering_tensorrt import TensorRtGraph

pytestmark = pytest.mark.rtx
LEFT, EVERY = ("o_proj", "down_proj"), ("_proj",)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8": ("FP8", {}),
    "FP8, a scale each": ("FP8", {"shared": False}),
    "INT8": ("W8A8_SQ_PER_CHANNEL", {"smooth": EVERY}),
    "INT8, a scale each": ("W8A8_SQ_PER_CHANNEL", {"smooth": EVERY, "shared": False}),
    "INT8 weights": ("W8A16", {}),
    "INT4 AWQ": ("W4A16_AWQ", {"smooth": LEFT}),
    "INT4 AWQ, a scale each": ("W4A16_AWQ", {"smooth": EVERY, "shared": False}),
    "INT4": ("W4A16_AWQ", {"config": {"group_size": None}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("lowering", "floats"), [(PluginGraph, "bfloat16"), (NativeGraph, "bfloat16"), (NativeGraph, "float16")]
)
def test_target(
    case: str,
    lowering: type[TensorRtGraph],
    floats: str,
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    algorithm, options = CASES[case]
    path = make_target(tmp_path / "t", **{**DIMS, "num_layers": 1})
    target = load_checkpoint(quantize(path, algorithm, **options))
    builder = RealBuilder(record_property)
    builder.build(*Graphs(tmp_path, lowering, floats).target(target, (0,)), target_sizes(LIMITS))
