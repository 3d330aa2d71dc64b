"""Engines with products of 8-bit integers: what is rounded, against NumPy and against transformers rounded alike, and
what must not depend on the rounding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import BY_SWITCHES, make_pair, make_target
from engine_builds import build_engine
from hypothesis import given
from hypothesis import strategies as st
from numerics import Follower, Truth, path_to, random_tree
from numpy.typing import NDArray
from onnx import TensorProto
from quantized import quantize
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ddtree_trt.artifact.files import TARGET_GRAPH
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.dryrun import dry_run
from ddtree_trt.build.graph.lowering_int8 import LARGEST, PARTS, Int8Graph, quantize_channels
from ddtree_trt.build.graph.ops import Fine, Table
from ddtree_trt.build.graph.rotation import rotate, rotation_matrix, walsh
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.onnxruntime.network import session_options
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

WIDTH, OUTPUTS = 48, 33


class Memory:
    """Weights inside the graph, so that a model is whole in memory."""

    def add(self, key: str, make: Any, dtype: str) -> TensorProto:
        return onnx.numpy_helper.from_array(np.ascontiguousarray(make()), key)


def session(
    weight: NDArray[np.float32],
    *,
    head: bool = False,
    gated: bool = False,
    fine: Fine | None = None,
    threads: int = 1,
) -> ort.InferenceSession:
    """One product with a weight [in, out]: `y` [1, R, out] of rows `x` [1, R, in], or of gate and up."""
    g = Int8Graph("product", Memory())
    g.input("x", "float32", [1, "R", weight.shape[0] * (2 if gated else 1)])
    if head:
        g.head("x", Table("lm_head", "table", lambda: weight.T, weight.shape[::-1]), "y")
    else:
        g.linear("x", "weight", lambda: weight, "y", len(weight) if gated else 0, fine)
    g.output("y", "float32", [1, "R", weight.shape[1]])
    options = session_options(threads)
    return ort.InferenceSession(g.model().SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(product: ort.InferenceSession, x: NDArray[np.float32]) -> NDArray[np.float32]:
    (found,) = product.run(None, {"x": x[None]})
    return found[0]


def rounded_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    largest = np.abs(x).max(-1, keepdims=True)
    return np.rint(x.astype(np.float64) / largest * LARGEST).astype(np.int64), largest / np.float32(LARGEST)


@pytest.mark.parametrize(("rows", "head"), [(1, False), (2, True), (17, False), (65, True)])
def test_a_product_is_the_integers_one(rows: int, head: bool) -> None:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((WIDTH, OUTPUTS), dtype=np.float32)
    x = (rng.standard_normal((rows, WIDTH)) * np.exp(rng.normal(size=(rows, 1)) * 4)).astype(np.float32)
    found = run(session(weight, head=head), x)
    values, scales = quantize_channels(weight)
    whole, row_scales = rounded_rows(x)
    expected = (whole @ values.astype(np.int64)) * row_scales * scales
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7 * np.abs(expected).max())
    exact = x @ weight
    assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()  # and it is about the product itself


def test_sums_do_not_overflow() -> None:
    """The largest products there are, of one sign: kernels that add pairs of them in 16 bits are a third off."""
    weight, x = np.ones((256, 3), np.float32), np.ones((2, 256), np.float32)
    found = run(session(weight), x)
    np.testing.assert_allclose(found, np.full((2, 3), 256), rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"gated": True}, {"fine": (OUTPUTS - 8, 8)}], ids=str)
@pytest.mark.parametrize("width", [1, 17, WIDTH, 130, 640])
def test_a_row_does_not_depend_on_the_others(width: int, how: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((width, OUTPUTS), dtype=np.float32)
    alone, several = session(weight, **how), session(weight, threads=3, **how)
    x = rng.standard_normal((70, width * (2 if "gated" in how else 1)), dtype=np.float32)
    x[3] *= 1e6
    x[4] = 0
    single = np.concatenate([run(alone, row[None]) for row in x])
    for count in (*range(2, 18), 70):
        np.testing.assert_array_equal(run(several, x[:count]), single[:count])
    assert not single[4].any()


def test_fine_outputs_have_no_error_of_their_weights() -> None:
    """Only that of the rows remains, which is the same in all outputs; the others are as without fine ones."""
    rng = np.random.default_rng(2)
    weight, x = rng.standard_normal((WIDTH, OUTPUTS), dtype=np.float32), rng.standard_normal((9, WIDTH))
    found, plain = (run(session(weight, fine=fine), x.astype(np.float32)) for fine in ((OUTPUTS - 8, 8), None))
    whole, row_scales = rounded_rows(x.astype(np.float32))
    of_rows = (whole * row_scales.astype(np.float64)) @ weight
    np.testing.assert_allclose(found[:, -8:], of_rows[:, -8:], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(found[:, :-8], plain[:, :-8])
    assert np.abs(plain - of_rows)[:, -8:].max() > 10 * np.abs(found - of_rows)[:, -8:].max()


@pytest.mark.parametrize(("width", "share"), [(192, 0.5), (72, 0.7)])
def test_rows_of_swiglu_keep_their_small_values(width: int, share: float) -> None:
    """One value thirty times larger than the others costs at most that share of what it does in a plain product."""
    rng = np.random.default_rng(width)
    weight = rng.standard_normal((width, OUTPUTS), dtype=np.float32)
    gate, up = rng.standard_normal((2, 9, width), dtype=np.float32)
    gate[:, 7], up[:, 7] = 30, 1
    x = gate / (1 + np.exp(-gate.astype(float))) * up
    exact = x @ weight
    plain = np.abs(run(session(weight), x.astype(np.float32)) - exact).mean()
    rotated = np.abs(run(session(weight, gated=True), np.concatenate([gate, up], axis=1)) - exact).mean()
    assert rotated < share * plain


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_rounding_a_weight(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((height, width)) * 10.0 ** rng.integers(-8, 8, width)).astype(np.float32)
    weight[:, rng.random(width) < 0.2] = 0
    values, scale = quantize_channels(weight)
    assert values.dtype == np.int8 and (scale > 0).all() and np.isfinite(scale).all()
    assert np.abs(values.astype(int)).max() <= LARGEST
    assert (np.abs(values * scale - weight) <= scale / 2 * (1 + 1e-5)).all()
    assert (np.abs(values).max(0) == LARGEST)[weight.any(0)].all()  # no scale is larger than it must be


class Errors:
    """In place of `numerics.assert_close`: the largest error of every row, in units of the expected values' scale.

    A value on the border of two integers, or of two bfloat16 of a cache, may be rounded either way, by the last bit of
    the sum before it. Rows that see one have another rounding of the same network; those before the first are equal.
    """

    def __init__(self) -> None:
        self.rows: list[float] = []

    def __call__(self, found: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
        assert found.shape == expected.shape, what
        self.rows += (np.abs(found - expected).max(-1) / np.sqrt(np.mean(np.square(expected)))).tolist()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Errors:
    collected = Errors()
    monkeypatch.setattr("numerics.assert_close", collected)
    return collected


def follow(engine: OrtEngine, truth: Truth) -> None:
    """Prefill, branching trees, compaction, and again."""
    follower = Follower(engine, 1, truth)
    rng, vocabulary = np.random.default_rng(5), engine.manifest.target_dims.vocab_size
    follower.prefill(rng.integers(0, vocabulary, 20))
    for nodes in (1, 2, 17, 9):
        tree = random_tree(rng, nodes, vocabulary)
        follower.verify(tree)
        follower.commit(path_to(tree, int(tree.depths.argmax())))


@pytest.mark.parametrize(
    "shape",
    [{"tied": True}, {"tied": False}, *({"family": f} for f in BY_SWITCHES.values())],
    ids=["tied", "untied", *BY_SWITCHES],
)
def test_a_target_is_transformers_quantised(shape: dict[str, Any], errors: Errors, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path / "pair", **shape)
    engine = build_engine(target, drafter, tmp_path / "engine", precision="int8", max_batch=2)
    follow(engine, RoundedTruth(target, engine.manifest.drafting.dims.tap_layers))
    engine.close()
    engine.close()  # again is no error
    assert len(errors.rows) > 60
    assert np.mean(np.array(errors.rows) < 1e-4) > 0.01
    assert max(errors.rows) < 0.1


def test_the_truth_above_can_tell(errors: Errors, tmp_path: Path) -> None:
    """A network that is not rounded has no row in common."""
    target, drafter = make_pair(tmp_path / "pair")
    engine = build_engine(target, drafter, tmp_path / "engine", precision="int8", max_batch=2)
    follow(engine, Truth(target, engine.manifest.drafting.dims.tap_layers))
    assert min(errors.rows) > 1e-2


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of every array that is written into a weight file."""
    sizes: dict[str, int] = {}
    write = WeightFile._write

    def spy(self: WeightFile, key: str, array: NDArray[Any]) -> TensorProto:
        sizes[key] = array.nbytes
        return write(self, key, array)

    monkeypatch.setattr(WeightFile, "_write", spy)
    return sizes


@pytest.mark.parametrize("tied", [True, False])
def test_dry_run_knows_the_bytes(tied: bool, written: dict[str, int], tmp_path: Path) -> None:
    """To the byte, but for the rotary tables."""
    target, drafter = make_pair(tmp_path / "pair", tied=tied)
    request = BuildRequest(target="x", checkpoint=target, drafter=drafter, output=tmp_path / "e", precision="int8")
    compile_engine(request)
    tables = sum(size for key, size in written.items() if "rotary" in key)
    assert dry_run(request).memory.weights_bytes == sum(written.values()) - tables
    kept = {key for key in written if not key.endswith((".int8", ".scale"))}
    assert {key for key in kept if "norm" not in key and "rotary" not in key} == {
        "model.embed_tokens.weight",
        "drafter.fc",
        "rotation.into",
        "rotation.out",
    }


def test_an_autoregressive_drafter_has_a_head_of_its_own(written: dict[str, int], tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path / "pair")
    small = make_target(tmp_path / "small", num_layers=1, seed=1)
    compile_engine(BuildRequest(target="x", checkpoint=target, drafter=small, output=tmp_path / "e", precision="int8"))
    assert {f"{prefix}model.embed_tokens.weight.head.int8" for prefix in ("", "drafter.")} <= written.keys()
    with LLM(tmp_path / "e") as llm:
        (output,) = llm.generate([list(range(5, 25))], SamplingParams(max_tokens=20, method="draft-model"))
        assert output.metrics.output_tokens == 20


def test_a_quantised_target_is_taken_for_what_it_stands_for(tmp_path: Path) -> None:
    """Its float32 values are rotated and quantised like any other target's."""
    target, drafter = make_pair(tmp_path / "pair")
    quantize(target, "W8A8_SQ_PER_CHANNEL")
    down = load_checkpoint(target).tensor("model.layers.0.mlp.down_proj.weight")
    hidden, inner = down.shape
    parts = math.gcd(inner, PARTS)
    expected = rotate(walsh(down, parts).T / np.float32(parts), hidden)
    request = BuildRequest(target="x", checkpoint=target, drafter=drafter, output=tmp_path / "e", precision="int8")
    compile_engine(request)
    graph = onnx.load(tmp_path / "e" / TARGET_GRAPH)
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in graph.graph.initializer if "layers.0.down" in i.name}
    values, scale = stored["model.layers.0.down.int8"], stored["model.layers.0.down.scale"]
    panels, steps, outputs, inputs = values.shape
    whole = (values.astype(int) - 128).transpose(1, 3, 0, 2).reshape(steps * inputs, panels * outputs)
    assert np.abs(whole[:inner, :hidden] * scale - expected).max() <= scale.max() / 2 * (1 + 1e-5)


def test_only_where_there_are_such_products(tmp_path: Path) -> None:
    request = BuildRequest(target="tiny", output=tmp_path / "e", backend="torch", precision="int8")
    with pytest.raises(UsageError, match="precision 'int8' is not available: the torch backend computes in"):
        compile_engine(request)
    assert not (tmp_path / "e").exists()


# A target as transformers computes it when it is rotated and rounded as int8 engines are


def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Of [1, heads, T, D] with a cache of bfloat16, where all positions are of one unit."""
    q, k, v = (x.bfloat16().float() for x in (query * scaling, key, value))
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = q @ k.mT + mask
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return (shares.bfloat16().float() @ v / shares.sum(-1, keepdim=True)).transpose(1, 2).contiguous(), None


AttentionInterface.register("bfloat16", attention)
AttentionMaskInterface.register("bfloat16", eager_mask)


class RoundedTruth(Truth):
    """transformers, with the stream rotated by a matrix, the inputs and the weight of every projection rounded, and
    attention in bfloat16."""

    def __init__(self, directory: Path, tap_layers: Any) -> None:
        super().__init__(directory, tap_layers)
        self.model.config._attn_implementation = "bfloat16"
        network, config = self.model.model, self.model.config
        stream = torch.from_numpy(rotation_matrix(config.hidden_size))
        head = torch.from_numpy(rotation_matrix(config.head_dim))
        width, parts = config.intermediate_size, math.gcd(config.intermediate_size, PARTS)
        values = torch.block_diag(*[head] * config.num_key_value_heads)
        outputs = torch.block_diag(*[head] * config.num_attention_heads)
        inner = torch.from_numpy(walsh(np.eye(width, dtype=np.float32), parts) / np.float32(math.sqrt(parts)))
        with torch.no_grad():
            back, out = stream.T, torch.diag(network.norm.weight) @ stream
            self._set(self.model.lm_head, self.model.lm_head.weight @ stream, lambda x: self._round(x @ back @ out))
            network.norm.weight.fill_(1)
            network.embed_tokens.weight = torch.nn.Parameter(network.embed_tokens.weight @ stream)
            for layer in network.layers:
                attention, mlp = layer.self_attn, layer.mlp
                for module in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                    norm = layer.input_layernorm if module not in (mlp.gate_proj, mlp.up_proj) else None
                    norm = norm or layer.post_attention_layernorm
                    weight = module.weight @ torch.diag(norm.weight) @ stream
                    if module is attention.v_proj:
                        weight = values.T @ weight
                        if module.bias is not None:
                            module.bias.copy_(values.T @ module.bias)
                    self._set(module, weight, self._round, twice=module is attention.v_proj)
                self._set(attention.o_proj, stream.T @ attention.o_proj.weight @ outputs, self._round)
                self._set(mlp.down_proj, stream.T @ mlp.down_proj.weight @ inner, lambda x: self._round(x @ inner))
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight.fill_(1)

    @staticmethod
    def _set(module: Any, weight: torch.Tensor, prepare: Any, *, twice: bool = False) -> None:
        """`twice`: what rounding takes from the weight is rounded and added."""
        exact = np.ascontiguousarray(weight.detach().numpy().T)
        values, scale = quantize_channels(exact)
        rounded = values * scale
        if twice:
            values, scale = quantize_channels(exact - rounded)
            rounded += values * scale
        module.weight = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(rounded.T)))
        module.register_forward_pre_hook(lambda _, inputs: prepare(inputs[0]))

    @staticmethod
    def _round(x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        return torch.round(x / largest * LARGEST) * largest / LARGEST
