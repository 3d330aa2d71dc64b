"""Configurations of published drafters: each is read right, or refused with the name of what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.rope_scaling import RopeScaling

FIXTURES = Path(__file__).parents[2] / "fixtures" / "drafters"
TAPS_36 = (1, 9, 17, 25, 33)

# Fields of `DFlashDims` by the fixture's name. Those of the first published checkpoints, where not named, have their
# defaults.
READ: dict[str, dict[str, Any]] = {
    "zlab-qwen3-4b-dflash": {"block_size": 16, "tap_layers": TAPS_36, "num_target_layers": 36, "num_layers": 5},
    "zlab-qwen3.6-27b-dflash": {
        "block_size": 16,
        "tap_layers": (1, 16, 31, 46, 61),
        "windows": (2048, 2048, 2048, 2048, 0),
        "causal": (True, True, True, True, False),
    },
    "zlab-qwen3.6-35b-a3b-dflash": {
        "block_size": 16,
        "mask_token_id": 248077,
        "tap_layers": (1, 6, 11, 16, 22, 27, 32, 37),
        "windows": (4096,) * 5 + (0,),
        "causal": (True,) * 5 + (False,),
        "rope_theta": 1e7,
    },
    "zlab-qwen3.5-9b-dflash": {"block_size": 16, "mask_token_id": 248070, "tap_layers": (1, 8, 15, 22, 29)},
    "zlab-qwen3.8-27b-dflash2": {
        "block_size": 8,
        "draft_length": 7,
        "tap_layers": (5, 19, 33, 47, 61),
        "windows": (2048,) * 5,
        "selector": Selector(top=16, rank=256),
        "convolution": Convolution(taps=2, groups=320),
    },
    "zlab-muse-glimmer-30b-dflash2": {
        "block_size": 16,
        "draft_length": 15,
        "tap_layers": (1, 13, 25, 37, 49),
        "windows": (2048,) * 5,
        "selector": Selector(top=16, rank=256),
        "convolution": Convolution(taps=2, groups=416),
        "logit_scale": 0.19611613513818404,
        "logit_cap": 20.0,
    },
    "jetspec-qwen3.6-35b-a3b": {
        "block_size": 16,
        "num_layers": 8,
        "tap_layers": (1, 10, 19, 28, 37),
        "causal": (True,) * 8,
    },
    "deepspec-dflash-qwen3-8b": {
        "block_size": 7,
        "draft_length": 7,
        "mask_token_id": 151669,
        "tap_layers": TAPS_36,
        "num_target_layers": 36,
        "anchor_first": True,
        "own_embedding": True,
        "own_head": True,
    },
    **{
        f"deepspec-dspark-qwen3-{size}": {
            "block_size": 7,
            "tap_layers": taps,
            "num_target_layers": layers,
            "anchor_first": True,
            "own_embedding": True,
            "own_head": True,
            "markov_rank": 256,
        }
        for size, layers, taps in (("4b", 36, TAPS_36), ("8b", 36, TAPS_36), ("14b", 40, (1, 10, 19, 28, 37)))
    },
    "radixark-qwen3.8-27b-dspark": {
        "block_size": 7,
        "mask_token_id": 248077,
        "tap_layers": (4, 16, 28, 40, 52),
        "anchor_first": True,
        "markov_rank": 256,
        "max_positions": 262144,
        "rope_scaling": RopeScaling("yarn", 32.0, 8192, attention_factor=1.3465735902799727),
    },
    "redhat-qwen3-8b-dflash": {
        "block_size": 8,
        "draft_length": 7,
        "tap_layers": TAPS_36,
        "num_target_layers": None,
        "draft_vocab_size": 32000,
        "vocab_size": 151936,
        "own_embedding": True,
        "own_head": True,
        "rope_theta": 1e4,
    },
    "redhat-qwen3.6-35b-a3b-dspark": {
        "draft_length": 8,
        "tap_layers": (1, 9, 19, 29, 36),
        "num_target_layers": None,
        "windows": (2048,) * 5,
        "causal": (True,) * 5,
        "anchor_first": True,
        "draft_vocab_size": 32000,
        "own_embedding": True,
        "own_head": True,
        "markov_rank": 256,
    },
    "redhat-glm-5.2-dspark": {
        "draft_length": 7,
        "tap_layers": (7, 22, 38, 54, 69),
        "num_target_layers": None,
        "own_embedding": True,
        "own_head": True,
        "markov_rank": 256,
    },
}  # fmt: skip
REFUSED = {
    "zlab-gpt-oss-20b-dflash": "model_type is 'gpt_oss', only dense Qwen3",
    "muse-glimmer-assistant": "model_type is 'muse_glimmer_assistant', only dense Qwen3",
    "mimo-v2.5-pro-dflash": "dflash_config.attention_sink_bias is true, which is not implemented",
    "deepspec-dspark-gemma4-12b": "model_type is 'gemma4_text', only dense Qwen3",
    "specforge-domino-qwen3-8b": "architectures is 'DominoDraftModel', which is not implemented",
    "liquid-lfm2.5-dspark": "architectures is 'Lfm2DSparkDraftModel', which is not implemented",
    "ornith-35b-dspark": "transformer_layer_config.rope_parameters.partial_rotary_factor is 0.25",
}


def fixture(name: str) -> dict[str, Any]:
    loaded = json.loads((FIXTURES / f"{name}.json").read_text())
    assert loaded["checkpoint"] and loaded["source"]
    return loaded


def read(path: Path, config: dict[str, Any]) -> DFlashDims:
    (path / "config.json").write_text(json.dumps(config))
    dims = read_config(path).dims
    assert isinstance(dims, DFlashDims)
    return dims


def test_every_fixture_is_read_or_refused() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == READ.keys() | REFUSED.keys()
    assert len(READ) >= 12


@pytest.mark.parametrize("name", READ)
def test_a_published_drafter_is_read(tmp_path: Path, name: str) -> None:
    dims, expected = read(tmp_path, fixture(name)["config"]), READ[name]
    assert {field: getattr(dims, field) for field in expected} == expected
    assert set(dims.features()) == {
        field
        for field in ("windows", "causal", "anchor_first", "draft_vocab_size", "own_embedding", "own_head",
                      "markov_rank", "selector", "convolution", "logit_scale", "logit_cap")
        if field in expected
    }  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_drafter_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, fixture(name)["config"])
    assert REFUSED[name] in str(caught.value) and "\n" not in str(caught.value)


def test_the_kind_of_a_markov_head(tmp_path: Path) -> None:
    """Plain or gated, and a rank of 0 is no head; a recurrent one is refused."""
    config = fixture("deepspec-dspark-qwen3-4b")["config"]
    cases = (("vanilla", 256, False), ("gated", 256, True), ("gated", 0, False))
    for kind, rank, gated in cases:
        dims = read(tmp_path, {**config, "markov_head_type": kind, "markov_rank": rank})
        assert (dims.markov_rank, dims.markov_gated) == (rank, gated)
    with pytest.raises(CheckpointError, match="markov_head_type"):
        read(tmp_path, {**config, "markov_head_type": "rnn"})
