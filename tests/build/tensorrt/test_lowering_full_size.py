"""The TensorRT graphs of the published pairs, full size but without their weights: onnx's checker, strict shape
inference, and no operator that TensorRT's parser does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from lowered import SUPPORTED, with_body
from onnx import ModelProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_tensorrt import PluginGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.ops import TYPES, Make
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import EMBEDDING, HEAD, language_model_shapes
from workbench.random_pair import SHAPES


class SparseWeights:
    """A weight file that has a length and no blocks. An array is made for its shape once per kind of layer."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, key: str, make: Make, dtype: str) -> TensorProto:
        kind = re.sub(r"\d+", "", key)
        if kind not in self._shapes:
            self._shapes[kind] = make().shape
        tensor = TensorProto(name=key, data_type=TYPES[dtype], dims=self._shapes[kind])
        length = helper.tensor_dtype_to_np_dtype(TYPES[dtype]).itemsize * int(np.prod(tensor.dims))
        tensor.data_location = TensorProto.EXTERNAL
        for name, value in (("location", self._path.name), ("offset", self._end), ("length", length)):
            tensor.external_data.add(key=name, value=str(value))
        self._end += length
        return tensor

    def close(self) -> None:
        with self._path.open("wb") as file:
            file.truncate(self._end)


def zeros(shapes: dict[str, tuple[int, ...]]) -> Callable[[str], np.ndarray]:
    """Weights by name that take one byte each kind, however large."""
    return lambda name: np.broadcast_to(np.zeros((), np.int8), shapes[name])


@pytest.fixture(scope="module", params=["qwen3-4b", "qwen3-8b"])
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelProto]:
    """Both graphs of a preset, checked beside their sparse weights."""
    shape, limits, folder = SHAPES[request.param], PRESETS[request.param].limits, tmp_path_factory.mktemp("full")
    dims, drafter, kind, tied = shape.target, shape.drafter, kind_of(shape.drafter), shape.tied
    weights = zeros(language_model_shapes(dims, tied=tied))
    own = SimpleNamespace(kind=kind, dims=drafter, tensor=zeros(kind.shapes(tied=tied)))
    its_target = SimpleNamespace(tensor=weights, tie_word_embeddings=tied)
    found = {}
    for network in ("target", "drafter"):
        sink = SparseWeights(folder / f"{network}.bin")
        g = PluginGraph(network, sink, "bfloat16")
        if network == "target":
            model = build_target_graph(g, dims, weights, tap_layers=drafter.tap_layers, limits=limits, tied=tied)
        else:
            model = kind.load("graph")(g, own, its_target, limits)
        sink.close()
        path = folder / f"{network}.onnx"
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path), full_check=False)
        found[network] = model
    return found


def test_every_operator_is_one_tensorrt_has(graphs: dict[str, ModelProto]) -> None:
    for model in graphs.values():
        assert {node.op_type for node in model.graph.node if not node.domain} <= SUPPORTED
        ours = [node for node in model.graph.node if node.domain]
        layers = sum(value.name.startswith("past_key") for value in model.graph.input)
        assert [(n.domain, n.op_type) for n in ours] == [(plugins.NAMESPACE, plugins.ATTENTION)] * layers
        assert len({node.name for node in model.graph.node}) == len(model.graph.node), "errors name nodes"


@pytest.mark.parametrize("network", ["target", "drafter"])
def test_strict_shape_inference(graphs: dict[str, ModelProto], network: str) -> None:
    """Through the plugin too, whose function body stands in for its shape rules."""
    model = with_body(graphs[network])
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    known = {v.name: v.type.tensor_type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    halves = {TensorProto.BFLOAT16, TensorProto.FLOAT}
    for node in inferred.graph.node:
        for out in node.output:
            assert out in known, f"nothing is known of {out}"
            assert known[out].HasField("shape"), out
        if node.op_type in ("MatMul", "Gemm"):
            head = names.HEAD in node.input  # logits are summed and kept in float32
            assert known[node.output[0]].elem_type == (TensorProto.FLOAT if head else TensorProto.BFLOAT16)
        if node.op_type in ("ReduceMean", "Sqrt", "Exp", "Log", "Sigmoid"):
            assert known[node.output[0]].elem_type == TensorProto.FLOAT
        if node.op_type == "MatMul":
            assert known[node.output[0]].shape.dim[-1].dim_value > 0
    assert {v.type.tensor_type.elem_type for v in model.graph.input} <= {TensorProto.INT32, *halves}


def test_inputs_and_outputs_are_the_contract(graphs: dict[str, ModelProto]) -> None:
    limits = Limits(max_seq_len=4096, max_batch=4)
    words, rows = -(-limits.max_tokens_per_pass // 32), limits.cache_rows
    for network, model in graphs.items():
        graph = model.graph
        shapes = {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in (*graph.input, *graph.output)
        }
        hidden = shapes[names.EMBEDDING][1]
        assert shapes[names.EMBEDDING] == [151936, hidden]
        assert shapes[names.HEAD] == [151936, hidden]
        assert shapes["past_key.0"] == shapes["present_value.0"] == [4, 8, rows, 128]
        assert shapes[names.SLOT_IDS] == shapes[names.PAST_LEN] == ["N"]
        if network == "target":
            assert shapes[names.TREE_MASK] == ["N", "T", words]
            assert shapes[names.TAPS] == ["N", "T", 5 * hidden] and shapes[names.LOGITS] == ["R", 151936]
        else:
            assert shapes[names.TAPS] == ["N", "C", 5 * hidden] and shapes[names.POSITIONS] == ["N", "C+block"]
            assert shapes[names.LOG_PROBS] == shapes[names.CANDIDATES] == ["N", 15, 256]


def test_logits_are_a_product_of_float32(graphs: dict[str, ModelProto]) -> None:
    """Summed and kept in float32: a product of halves would be rounded to halves before anything could cast it."""
    for network, model in graphs.items():
        graph = model.graph
        kinds = {v.name: v.type.tensor_type.elem_type for v in graph.input}
        assert kinds[names.HEAD] == TensorProto.FLOAT != kinds[names.EMBEDDING]
        (product,) = (node for node in graph.node if names.HEAD in node.input)
        made = {out: node for node in graph.node for out in node.output}
        cast = made[product.input[0]]
        assert (cast.op_type, cast.attribute[0].i) == ("Cast", TensorProto.FLOAT)
        assert product.output[0] == (names.LOGITS if network == "target" else "flat_logits")
        readers = [node.op_type for node in graph.node if product.output[0] in node.input]
        assert "Cast" not in readers


def test_the_tables_are_no_weights(graphs: dict[str, ModelProto]) -> None:
    """The embedding and the head are inputs; nothing of that size is in a plan."""
    for model in graphs.values():
        sizes = {t.name: int(np.prod(t.dims)) for t in model.graph.initializer}
        assert not {EMBEDDING, HEAD} & set(sizes) and max(sizes.values()) < 151936 * 2560


def test_attributes_the_plugin_is_found_by(graphs: dict[str, ModelProto]) -> None:
    (node, *_) = (n for n in graphs["target"].graph.node if n.domain)
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert set(found) == {*plugins.ATTENTION_ATTRIBUTES, "plugin_namespace", "plugin_version"}
    assert (found["plugin_namespace"], found["plugin_version"]) == (b"ddtree", b"1")
    assert found[plugins.MAX_TREE] == 257 and found[plugins.MASK_MODE] == 0
    assert found[plugins.SCALE] == pytest.approx(128**-0.5)
