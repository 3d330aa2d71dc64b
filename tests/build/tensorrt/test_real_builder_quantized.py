"""Quantised checkpoints through TensorRT's real parser and builder, those of TensorRT for RTX: no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_target
from quantized import CASES, quantize
from real_builder import RealBuilder
from real_graphs import DIMS, LIMITS, Graphs

from ddtree_trt.build.backends.tensorrt.profiles import target_sizes
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.graph.lowering_native import NativeGraph
from ddtree_trt.build.graph.lowering_plugin import PluginGraph
from ddtree_trt.build.graph.lowering_tensorrt import TensorRtGraph

pytestmark = pytest.mark.rtx


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("lowering", "floats"), [(PluginGraph, "bfloat16"), (NativeGraph, "bfloat16"), (NativeGraph, "float16")]
)
def test_target(
    case: str,
    lowering: type[TensorRtGraph],
    floats: str,
    tmp_path: Path,
) -> None:
    algorithm, options = CASES[case]
    path = make_target(tmp_path / "t", **{**DIMS, "num_layers": 1})
    target = load_checkpoint(quantize(path, algorithm, **options))
    RealBuilder().build(*Graphs(tmp_path, lowering, floats).target(target, (0,)), target_sizes(LIMITS))
