"""Mixtures of experts: routing as transformers does it, both forms of the sum, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import EXPERTS, edit_json, make_pair, make_target, refusal
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.artifact.manifest import load_manifest, parse_manifest
from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.models.decoder import Experts
from ddtree_trt.models.families import QWEN3_MOE
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch.model import mix_all, mix_grouped, mixture, route

TARGETS = Path(__file__).parents[1] / "fixtures" / "targets"


def swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("experts", [Experts(8, 3, True), Experts(16, 4, False), Experts(5, 5, True)])
@pytest.mark.parametrize("rows", [1, 2, 17, 257])
def test_routing_and_sum_are_those_of_transformers(experts: Experts, rows: int) -> None:
    """The experts of every row, to the number; their weights to the bit; the sum within rounding, in both forms."""
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=48,
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        norm_topk_prob=experts.normalised,
    )
    torch.manual_seed(rows)
    block = Qwen3MoeSparseMoeBlock(config).eval()
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    h = torch.randn(1, rows, 32)
    with torch.no_grad():
        _, expected_weights, expected = block.gate(h[0])
        weights, chosen = route(h[0], block.gate.weight, experts)
        assert torch.equal(chosen, expected) and torch.equal(weights, expected_weights)
        both, down = block.experts.gate_up_proj, block.experts.down_proj
        found = mixture(h, block.gate.weight, both.flatten(0, 1), down.flatten(0, 1), experts, swiglu)
        torch.testing.assert_close(found, block(h), atol=1e-5, rtol=1e-5)
        parts = (h[0], weights, chosen, both.transpose(1, 2), down.transpose(1, 2), swiglu)
        torch.testing.assert_close(mix_all(*parts), mix_grouped(*parts), atol=1e-5, rtol=1e-5)


def test_a_published_configuration(tmp_path: Path) -> None:
    shutil.copy(TARGETS / "qwen3-30b-a3b.json", tmp_path / "config.json")
    dims = read_config(tmp_path).dims
    assert dims.experts == Experts(128, 8, normalised=True)
    assert (dims.intermediate_size, dims.widest, dims.qk_norm) == (768, 6144, True)


def test_the_count_by_its_other_name(tmp_path: Path) -> None:
    path = make_target(tmp_path, family=QWEN3_MOE, config={"num_experts": None, "num_local_experts": EXPERTS.count})
    assert read_config(path).dims.experts == EXPERTS
    edit_json(path / "config.json", num_experts=4)
    assert "num_local_experts is 8, but num_experts is 4: which is it?" in refusal(path)


def test_what_backends_refuse(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, family=QWEN3_MOE)
    pair = {"target": "x", "checkpoint": target, "drafter": drafter, "output": tmp_path / "e"}
    for options, words in (
        ({"precision": "int8"}, "mixtures of experts are not implemented in int8; use --precision fp32"),
        ({"backend": "tensorrt"}, "mixtures of experts are not implemented for TensorRT; use --backend torch"),
    ):
        with pytest.raises(UsageError, match=words):
            dry_run(BuildRequest(**pair, **options))  # type: ignore[arg-type]
    compile_engine(BuildRequest(**pair))  # type: ignore[arg-type]
    engine = open_engine(tmp_path / "e")
    assert engine.inexact and "experts" in engine.inexact
    engine.close()
    assert load_manifest(tmp_path / "e").target_dims.experts == EXPERTS
    body = json.loads((tmp_path / "e" / MANIFEST).read_text())
    body["target_dims"]["experts"]["per_token"] = 9
    with pytest.raises(ArtifactError, match=r"target_dims\.experts: per_token 9 is more than the count 8"):
        parse_manifest(json.dumps(body), "m")
