"""The TensorRT graph of an FP8 checkpoint, in ONNX Runtime, against transformers with the same rounding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import make_drafter, make_target, write_safetensors
from engine_builds import build_engine
from lowered import LoweredPair, with_body
from numerics import TOLERANCE, Array, Truth, path_to, random_tree
from onnx import TensorProto
from quantized import quantize

from ddtree_trt.artifact import DrafterDims, Limits
from ddtree_trt.build.checkpoint import Checkpoint, load_checkpoint
from ddtree_trt.build.graph import build_target_graph
from ddtree_trt.build.ops_tensorrt import TensorRtGraph
from ddtree_trt.build.weights import WeightFile
from ddtree_trt.errors import BuildError
from ddtree_trt.plugins import MaskMode

LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=20, prefill_chunk=32)
DIMS = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128}


class Fp8Truth(Truth):
    """transformers in float32 on the values the weights stand for; inputs of projections are rounded to FP8."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, rounded: bool) -> None:
        weights = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
        folder.mkdir()
        (folder / "config.json").write_text((checkpoint.directory / "config.json").read_text())
        write_safetensors(folder / "model.safetensors", weights, "fp32")
        super().__init__(folder, (0, 2))
        for name, module in self.model.named_modules():
            weight = f"{name}.weight"
            scales = checkpoint.scales(weight) if weight in checkpoint.tensors else None
            if rounded and scales is not None:
                module.register_forward_pre_hook(self._rounder(scales.input))

    def _rounder(self, scale: float) -> object:
        def round_input(module: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            scaled = (inputs[0] / scale).clamp(-448, 448)
            return (scaled.to(torch.float8_e4m3fn).float() * scale,)

        return round_input


def error(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected))))


@pytest.fixture(scope="module", params=["one scale for q, k, v", "a scale each"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    target = make_target(tmp_path_factory.mktemp("fp8") / "target", **DIMS)
    return load_checkpoint(quantize(target, shared=request.param != "a scale each"))


def test_prefill_and_a_tree(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What rounds to another of the 8-bit values now and then moves a logit a little; leaving the rounding out moves it
    much more."""
    drafter = load_checkpoint(make_drafter(tmp_path / "drafter", **DIMS))
    lowered = LoweredPair(tmp_path / "graphs", checkpoint, drafter, LIMITS, "float32")
    exact = Fp8Truth(tmp_path / "exact", checkpoint, rounded=True)
    unrounded = Fp8Truth(tmp_path / "unrounded", checkpoint, rounded=False)
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 96, 20)
    found = lowered.prefill(0, prompt)
    close, far = error(found, exact(prompt)[0]), error(found, unrounded(prompt)[0])
    assert close < 0.01 and far > 0.1, (close, far)
    tree = random_tree(rng, 12, 96)
    _, logits = lowered.verify({0: tree})[0]
    for leaf in sorted(set(range(12)) - set(tree.parents.tolist())):
        path = path_to(tree, leaf)
        expected = exact([*prompt, *tree.token_ids[path]])[0][-len(path) :]
        assert error(logits[path], expected) < 0.01


def test_other_backends_compute_with_what_the_values_stand_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", **DIMS)
    engine = build_engine(checkpoint.directory, drafter, tmp_path / "engine", max_batch=1)
    prompt = np.random.default_rng(2).integers(0, 96, 20)
    truth = Fp8Truth(tmp_path / "truth", checkpoint, rounded=False)
    assert error(engine.prefill(0, prompt, rows="all", taps=False).logits, truth(prompt)[0]) < TOLERANCE


def bf16_graph(checkpoint: Checkpoint, folder: Path, floats: str = "bfloat16") -> onnx.ModelProto:
    with WeightFile(folder / "weights.bin") as sink:
        g, tied = TensorRtGraph("target", sink, floats), checkpoint.tie_word_embeddings
        graph = build_target_graph(
            g, checkpoint.dims, checkpoint.tensor, tap_layers=(0,), limits=LIMITS, tied=tied, quantized=checkpoint
        )
    (folder / "target.onnx").write_bytes(graph.SerializeToString())
    return graph


def test_the_graph_holds_the_stored_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    graph = bf16_graph(checkpoint, tmp_path)
    onnx.checker.check_model(str(tmp_path / "target.onnx"))
    inferred = onnx.shape_inference.infer_shapes(
        with_body(graph, MaskMode.TREE), check_type=True, strict_mode=True, data_prop=True
    )
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    kinds = Counter(node.op_type for node in graph.graph.node)
    weights = {t.name: t for t in graph.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN and t.dims}
    assert kinds["QuantizeLinear"] == len(weights) and kinds["DequantizeLinear"] == 2 * len(weights)
    scales = {checkpoint.scales(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"}
    assert len(weights) == checkpoint.dims.num_layers * (4 if len(scales) == 1 else 7)
    assert all(types[n.output[0]] == TensorProto.BFLOAT16 for n in graph.graph.node if n.op_type == "DequantizeLinear")
    (down,) = (t for name, t in weights.items() if "layers.1" in name and "down" in name)
    place = {entry.key: entry.value for entry in down.external_data}
    stored = np.fromfile(tmp_path / "weights.bin", np.uint8)[int(place["offset"]) :][: int(place["length"])]
    source = checkpoint.stored("model.layers.1.mlp.down_proj.weight")
    np.testing.assert_array_equal(stored.reshape(down.dims), source.T)


def test_a_scale_fp16_cannot_hold(tmp_path: Path) -> None:
    tiny = {"layers.1.mlp.up_proj.input_scale": np.float32([1e-6])}
    checkpoint = load_checkpoint(quantize(make_target(tmp_path / "t", **DIMS), replace=tiny))
    with pytest.raises(BuildError, match=r"up_proj.* is scaled by 1e-06, which fp16 cannot hold; use --precision bf16"):
        bf16_graph(checkpoint, tmp_path, "float16")


def test_a_quantised_drafter_is_taken_for_what_it_stands_for(tmp_path: Path) -> None:
    drafter = load_checkpoint(quantize(make_drafter(tmp_path / "d", **DIMS)))
    assert isinstance(drafter.dims, DrafterDims) and drafter.is_quantized
    assert np.isfinite(drafter.tensor("layers.0.mlp.up_proj.weight")).all()
