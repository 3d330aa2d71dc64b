"""The TensorRT graph of a quantised checkpoint, in ONNX Runtime, against transformers with the same rounding."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import edit_json, make_drafter, make_target, write_safetensors
from fake_trt_engine import build_trt_engine
from numerics import TOLERANCE, Array, Truth, path_to, random_tree
from onnx import numpy_helper
from quantized import CASES, GROUP, projections, quantize

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import PluginGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.ops import TYPES
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.errors import BuildError
from ddtree_trt.runtime.engines.base import VerifyRequest

LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=20, prefill_chunk=32)
DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128}


class QuantizedTruth(Truth):
    """transformers in float32 on the values the stored ones stand for, the inputs of projections scaled and rounded."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, rounded: bool = True) -> None:
        quantized = projections(checkpoint.path)
        weights = {
            n: quantized[n].weight.numpy() if n in quantized else checkpoint.tensor(n) for n in checkpoint.tensors
        }
        folder.mkdir()
        shutil.copy(checkpoint.path / "config.json", folder)
        write_safetensors(folder / "model.safetensors", weights, "fp32")
        edit_json(folder / "config.json", quantization_config=None)
        super().__init__(folder, (0, 2))
        for name, module in self.model.named_modules():
            if (found := quantized.get(f"{name}.weight")) is not None:
                module.register_forward_pre_hook(lambda _, x, found=found: (found.rows(x[0], rounded=rounded),))


def error(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected))))


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    algorithm, options = CASES[request.param]
    target = make_target(tmp_path_factory.mktemp("quantized") / "target", **DIMS)
    return load_checkpoint(quantize(target, algorithm, **options))


def test_prefill_and_a_tree(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What rounds to another of the 8-bit values now and then moves a logit a little; leaving the rounding out moves it
    much more."""
    engine = build_trt_engine(checkpoint.path, make_drafter(tmp_path / "drafter", **DIMS), tmp_path / "e", max_batch=1)
    exact = QuantizedTruth(tmp_path / "exact", checkpoint)
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 96, 20)
    found = np.asarray(engine.prefill(0, prompt, rows="all", taps=True).logits)
    close = error(found, exact(prompt)[0])
    assert checkpoint.quantization is not None
    rounds = checkpoint.quantization.format.rounds_inputs
    bound = 0.01 if rounds else TOLERANCE
    assert close < bound
    if rounds:
        far = error(found, QuantizedTruth(tmp_path / "unrounded", checkpoint, rounded=False)(prompt)[0])
        assert far > 5 * max(close, 1e-3), (close, far)
    tree = random_tree(rng, 12, 96)
    assert len(set(tree.parents.tolist())) < len(tree) - 1, "branches"
    logits = np.asarray(engine.verify([VerifyRequest(0, tree)])[0].logits)
    for leaf in sorted(set(range(12)) - set(tree.parents.tolist())):
        path = path_to(tree, leaf)
        assert error(logits[path], exact([*prompt, *tree.token_ids[path]])[0][-len(path) :]) < bound


def bf16_graph(checkpoint: Checkpoint, folder: Path, floats: str = "bfloat16") -> onnx.ModelProto:
    with WeightFile(folder / "weights.bin") as sink:
        graph = build_target_graph(PluginGraph("target", sink, floats), checkpoint, LIMITS, (0,), quantized=True)
    (folder / "target.onnx").write_bytes(graph.SerializeToString())
    return graph


def test_the_graph_holds_the_stored_values(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Once each, and not what they stand for."""
    assert checkpoint.quantization is not None
    form, graph = checkpoint.quantization.format, bf16_graph(checkpoint, tmp_path).graph
    weights = {t.name: t for t in graph.initializer if t.data_type == TYPES[form.values] and t.dims}
    assert len(weights) in (4 * checkpoint.dims.num_layers, 7 * checkpoint.dims.num_layers)
    (down,) = (t for name, t in weights.items() if "layers.1" in name and "down" in name)
    onnx.external_data_helper.load_external_data_for_tensor(down, str(tmp_path))
    stored = numpy_helper.to_array(down).astype(np.float32)
    scales = checkpoint.scales("model.layers.1.mlp.down_proj.weight")
    weight = projections(checkpoint.path)["model.layers.1.mlp.down_proj.weight"].weight.numpy()
    assert scales is not None
    by = np.repeat(scales.weight, GROUP, 1) if scales.weight.ndim == 2 else np.atleast_1d(scales.weight)[:, None]
    np.testing.assert_array_equal(stored.T * by, weight)


def test_a_scale_fp16_cannot_hold(tmp_path: Path) -> None:
    tiny = {"layers.1.mlp.up_proj.weight_scale": np.full((48, 2), 1e-6, np.float32)}
    checkpoint = load_checkpoint(quantize(make_target(tmp_path / "t", **DIMS), "W4A16_AWQ", replace=tiny))
    with pytest.raises(BuildError, match=r"(up_proj|gate_up).*scale is 1e-06, which fp16 cannot hold; use .* bf16"):
        bf16_graph(checkpoint, tmp_path, "float16")
