"""Networks of the real structure through TensorRT's real parser and builder, those of TensorRT for RTX: no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_drafter, make_target
from onnx import ModelProto
from real_builder import PLAN, RealBuilder, rtx

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.backends.tensorrt.native_attention import mend_attentions
from ddtree_trt.build.backends.tensorrt.profiles import drafter_sizes, target_sizes
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.graph.drafters import build_drafter
from ddtree_trt.build.graph.lowering_native import KEY_LENGTHS, NativeGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.errors import BuildError

pytestmark = pytest.mark.rtx

DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128, "num_layers": 2}
TAPS: dict[str, Any] = {"tap_layers": (0, 1), "num_target_layers": 2}
LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=40, prefill_chunk=32)


@pytest.fixture
def builder(record_property: Callable[[str, object], None]) -> RealBuilder:
    return RealBuilder(lambda size: record_property(PLAN, size))


class Pair:
    """The graphs of a target and a drafter, written where the parser reads them."""

    def __init__(self, folder: Path, floats: str, *, tied: bool = True, limits: Limits = LIMITS) -> None:
        self.folder, self.floats, self.limits = folder, floats, limits
        self.target = load_checkpoint(make_target(folder / "t", tied=tied, **DIMS))

    def write(self, name: str, make: Callable[[Any], ModelProto]) -> tuple[Path, ModelProto]:
        folder = self.folder / f"{name}-graph"
        folder.mkdir()
        with WeightFile(folder / "weights.bin") as sink:
            model = make(NativeGraph(name, sink, self.floats))
        path = folder / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        return path, model

    def target_graph(self) -> tuple[Path, ModelProto]:
        def make(g: NativeGraph) -> ModelProto:
            target, tied = self.target, self.target.tie_word_embeddings
            taps = TAPS["tap_layers"]
            return build_target_graph(
                g, target.dims, target.tensor, tap_layers=taps, limits=self.limits, tied=tied, quantized=target
            )

        return self.write("target", make)

    def drafter_graph(self, drafter: Checkpoint) -> tuple[Path, ModelProto]:
        return self.write("drafter", lambda g: build_drafter(g, drafter, self.target, self.limits))


@pytest.mark.parametrize("floats", ["bfloat16", "float16"])
def test_target_and_drafters(floats: str, builder: RealBuilder, tmp_path: Path) -> None:
    pair = Pair(tmp_path, floats)
    builder.build(*pair.target_graph(), target_sizes(LIMITS))
    drafter = load_checkpoint(make_drafter(tmp_path / "d", **{**DIMS, **TAPS}))
    builder.build(*pair.drafter_graph(drafter), drafter_sizes(LIMITS, drafter.kind.block_size))


def test_an_autoregressive_drafter(builder: RealBuilder, tmp_path: Path) -> None:
    drafter = load_checkpoint(make_target(tmp_path / "a", tied=False, tokenizer=False, **DIMS))
    builder.build(*Pair(tmp_path, "bfloat16").drafter_graph(drafter), drafter_sizes(LIMITS, None))


def test_every_attention_reads_its_cache_as_far_as_it_is_written(builder: RealBuilder, tmp_path: Path) -> None:
    trt, (path, model) = rtx(), Pair(tmp_path, "bfloat16").target_graph()
    network = builder.build(path, model, target_sizes(LIMITS))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    assert len(attentions) == DIMS["num_layers"]
    for n, layer in enumerate(attentions):
        layer.__class__ = trt.IAttentionInputLayer
        attention = layer.attention
        assert attention.key_value_lengths.name == KEY_LENGTHS and not attention.decomposable
        read = [attention.get_input(i).name for i in (1, 2)]
        assert read == [f"present_key.{n}", f"present_value.{n}"]
        assert attention.mask.dtype == trt.DataType.BOOL
        assert attention.get_input(0).name.endswith("rotated"), "nothing scales queries twice"


def test_an_attention_that_is_missing_is_named(builder: RealBuilder, tmp_path: Path) -> None:
    path, _ = Pair(tmp_path, "bfloat16").target_graph()
    network = builder.parse(path)
    with pytest.raises(BuildError, match=r"no attention layer of the target's node 'another\.attn'"):
        mend_attentions(builder.trt, network, "target", ["another.attn"])
    with pytest.raises(BuildError, match=r"that its graph does not have: 'model\.layers\.0\.attn\.by_head'"):
        mend_attentions(builder.trt, builder.parse(path), "target", [])


def test_an_attention_without_a_fused_kernel_is_named(builder: RealBuilder, tmp_path: Path) -> None:
    """There is none for float32."""
    with pytest.raises(AssertionError, match=r"attention '.*layers\.0\.attn\.by_head' has no fused kernel for FLOAT"):
        builder.build(*Pair(tmp_path, "float32").target_graph(), target_sizes(LIMITS))
