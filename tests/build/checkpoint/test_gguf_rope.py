"""Scaled positions of GGUF files: the config.json they stand for, transformers' frequencies, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_target, refusal
from gguf_files import make_gguf
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.models.families import LLAMA, QWEN2, QWEN3
from ddtree_trt.models.rotary import inverse_frequencies

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}
THETA, HEAD_DIM = 500000.0, 32  # divisors of every kind: 1, between, and the factor
# Keys of a file → the rope_scaling of the config.json that llama.cpp's converter would make them of.
STATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "linear-without-type": ({"factor": 2.5, "finetuned": True}, {"rope_type": "linear", "factor": 2.5}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "yarn-betas": (
        {"type": "yarn", "factor": 8.0, "original_context_length": 64, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5,
         "yarn_log_multiplier": 0.0, "yarn_ext_factor": -1.0, "attn_factor": 1.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
         "beta_slow": 0.5},
    ),
    "yarn-of-all-positions": ({"type": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}),
}  # fmt: skip


def frequencies(scaling: Mapping[str, Any], positions: int) -> tuple[torch.Tensor, float]:
    """transformers' inverse frequencies [D/2] of a config.json with that rope_scaling, and its attention factor."""
    sizes: Any = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": positions}
    config = LlamaConfig(**sizes, rope_parameters={"rope_theta": THETA, **scaling})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    return frequencies, factor


def target_of(path: Path, family: Any = LLAMA, **config: Any) -> Path:
    shape: dict[str, Any] = {"head_dim": HEAD_DIM, "rope_theta": THETA, "intermediate_size": 64}
    return make_target(path / "t", family=family, config=config, **shape)


def scaled(path: Path, entries: Mapping[str, Any], family: Any = LLAMA, divisors: Any = None) -> Path:
    """A GGUF file with these keys of a scaling, or the tensor of divisors."""
    metadata = {f"{family.model_type}.rope.scaling.{key}": value for key, value in entries.items()}
    tensors = {} if divisors is None else {"rope_freqs.weight": divisors.astype(np.float32)}
    return make_gguf(target_of(path, family), path / "m.gguf", metadata=metadata, tensors=tensors)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("name", STATED)
def test_metadata_is_its_configuration(family: Any, name: str, tmp_path: Path) -> None:
    entries, scaling = STATED[name]
    dims = load_checkpoint(scaled(tmp_path, entries, family)).dims
    positions = load_checkpoint(tmp_path / "t").dims.max_positions
    assert dims == load_checkpoint(target_of(tmp_path / "scaled", family, rope_scaling=scaling)).dims
    assert dims.rope_scaling is not None
    truth, magnitude = frequencies({"original_max_position_embeddings": positions, **scaling}, positions)
    np.testing.assert_allclose(inverse_frequencies(HEAD_DIM, THETA, dims.rope_scaling), truth.numpy(), rtol=2e-6)
    assert dims.rope_scaling.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize(
    "entries",
    [
        {"type": "none", "factor": 4.0, "yarn_beta_fast": 8.0},
        {"type": "linear"},
        {"type": "linear", "factor": 0.0, "original_context_length": 64},
        {"factor": 1.0},
        {"type": "yarn", "factor": 1.0},
    ],
)
def test_metadata_that_changes_nothing(entries: dict[str, Any], tmp_path: Path) -> None:
    assert load_checkpoint(scaled(tmp_path, entries)).dims == load_checkpoint(tmp_path / "t").dims


def divisors(factor: float, positions: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes for a llama3 scaling, by transformers' frequencies."""
    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = positions
    plain = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    return (plain / frequencies(scaling, positions)[0]).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_are_llama_3s_scaling(factor: float, tmp_path: Path) -> None:
    values = divisors(factor)
    assert values.min() == 1 and ((values > 1.01) & (values < factor - 0.01)).any()
    checkpoint = load_checkpoint(scaled(tmp_path, {}, divisors=values))
    scaling = checkpoint.dims.rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("llama3", factor)
    assert (scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor) == (8192, 1, 4)
    assert "rope_freqs.weight" not in checkpoint.shapes


def test_divisors_that_change_nothing(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(scaled(tmp_path, {}, divisors=np.ones(HEAD_DIM // 2)))
    assert checkpoint.dims.rope_scaling is None and "rope_freqs.weight" not in checkpoint.shapes


@pytest.mark.parametrize(
    "values",
    [
        divisors(8.0, positions=4096),
        divisors(8.0)[:-1],
        divisors(8.0)[::-1].copy(),
        np.where(np.arange(HEAD_DIM // 2) == 9, 1.1, 1) * divisors(8.0),
        np.full(HEAD_DIM // 2, 8.0),
        np.zeros(HEAD_DIM // 2),
        np.full(HEAD_DIM // 2, np.nan),
        np.full(HEAD_DIM // 2, 0.5),
    ],
    ids=["positions", "few", "reversed", "one-off", "linear", "zeros", "nan", "halves"],
)
def test_other_divisors_are_refused(values: np.ndarray, tmp_path: Path) -> None:
    assert "rope_freqs.weight" in refusal(scaled(tmp_path, {}, divisors=values))


def test_two_scalings_are_refused(tmp_path: Path) -> None:
    file = scaled(tmp_path, {"type": "linear", "factor": 2.0}, divisors=divisors(8.0))
    assert "both llama.rope.scaling.* and rope_freqs.weight scale positions: which is it?" in refusal(file)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, "type' is 'longrope', which is not implemented; only linear and yarn"),
        ({"type": 3}, "type' must be a text, found 3"),
        ({"type": ["yarn"]}, "type' must be a text"),
        ({"type": "yarn"}, "it has no llama.rope.scaling.factor"),
        ({"type": "yarn", "factor": 0.5}, "rope.scaling.factor' must be a number from 1 to"),
        ({"type": "linear", "factor": -2.0}, "rope.scaling.factor' must be a number from 1 to"),
        ({"type": "linear", "factor": "4"}, "rope.scaling.factor' must be a number from 1 to"),
        ({"type": "linear", "factor": 4.0, "alpha": 2.0}, "rope.scaling.alpha' is 2.0, which is not implemented"),
        ({"type": "none", "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1 is"),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 0}, "original_context_length' must be an integer"),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 0.5}, "beta_fast 0.5 is below beta_slow 1"),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 1.0}, "yarn_log_multiplier' is 1.0, which is not impl"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0}, "yarn_ext_factor' is 0.0, which is not implemented"),
    ],
)  # fmt: skip
def test_other_scalings_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(scaled(tmp_path, entries))
