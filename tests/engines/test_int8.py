"""Engines with products of 8-bit integers, which `test_cpu_products` is about: against transformers rounded alike, and
what must not depend on the rounding."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import BY_SWITCHES, make_drafter, make_pair, make_target
from engine_builds import build_engine
from numerics import Follower, Truth, path_to, random_tree
from numpy.typing import NDArray
from onnx import TensorProto
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.build.graph.lowering_onnxruntime import LARGEST, PARTS, quantize_channels
from ddtree_trt.build.graph.rotation import rotation_matrix, walsh
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.models.families import QWEN3
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams


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
    """Of five networks one at least sees no rounding fall the other way in the first half of its rows."""
    drafter = make_drafter(tmp_path / "drafter", family=shape.get("family", QWEN3))
    for seed in range(5):
        target = make_target(tmp_path / f"target-{seed}", seed=seed, **shape)
        engine = build_engine(target, drafter, tmp_path / f"engine-{seed}", precision="int8", max_batch=2)
        errors.rows.clear()
        follow(engine, RoundedTruth(target, engine.manifest.drafting.dims.tap_layers))
        engine.close()
        engine.close()  # again is no error
        assert len(errors.rows) > 60
        assert max(errors.rows) < 0.1
        if np.mean(np.array(errors.rows) < 1e-4) > 0.5:
            return
    pytest.fail("every network has other numbers")


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
    (target / "model.safetensors").unlink()  # no weight is looked at
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
