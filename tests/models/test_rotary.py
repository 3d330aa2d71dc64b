"""Frequencies of rotary embedding, plain and scaled, beside transformers' own, from the same config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from checkpoints import TARGET_DIMS, make_target, refusal
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.models.families import LLAMA
from ddtree_trt.models.rotary import inverse_frequencies
from tools import config_entries

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {**LLAMA3, "original_max_position_embeddings": 8192}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GRID: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8},
    LLAMA31,
    {**LLAMA3, "original_max_position_embeddings": 64, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    LLAMA3,  # the positions of training are max_position_embeddings
    YARN,
    {"rope_type": "yarn", "factor": 2.5},
    {**YARN, "original_max_position_embeddings": 4096, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.3},
    {**YARN, "mscale": 0.707},  # one of the two alone changes nothing
    {**YARN, "attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 1.0},
    {**YARN, "beta_fast": 8, "beta_slow": 2.5, "truncate": False},
    {**YARN, "original_max_position_embeddings": 16, "beta_fast": 64.0},  # the ramp leaves the head at both ends
]
SIZES = [(128, 1e6, 40960), (64, 5e5, 131072), (16, 1e4, 256)]  # head_dim, theta, positions


def read(path: Path, rope: dict[str, Any], head_dim: int, theta: float, positions: int, spelling: str) -> Any:
    """The dimensions of a config.json that states the scaling in one of the published ways."""
    config = config_entries.of_family(LLAMA, TARGET_DIMS)
    config |= {"head_dim": head_dim, "max_position_embeddings": positions, "rope_theta": theta}
    if spelling == "rope_parameters":
        del config["rope_theta"]
        config["rope_parameters"] = {**rope, "rope_theta": theta}
    else:
        name = "type" if spelling == "type" else "rope_type"
        config["rope_scaling"] = {name: rope["rope_type"], **{k: v for k, v in rope.items() if k != "rope_type"}}
    (path / "config.json").write_text(json.dumps(config))
    return read_config(path).dims


@pytest.mark.parametrize("number", range(len(GRID)), ids=lambda i: f"{i}-{GRID[i]['rope_type']}")
def test_scaled_frequencies_are_those_of_transformers(tmp_path: Path, number: int) -> None:
    """In every spelling and size by turns."""
    rope, size, spelling = GRID[number], SIZES[number % 3], ("rope_parameters", "rope_scaling", "type")[number % 3]
    dims = read(tmp_path, rope, *size, spelling)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    found = inverse_frequencies(dims.head_dim, dims.rope_theta, dims.rope_scaling)
    np.testing.assert_allclose(found, expected.numpy(), rtol=3e-6)
    assert dims.rope_scaling.attention_factor == pytest.approx(magnitude, rel=1e-12)
    assert dims.rope_theta == size[1]


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (YARN, 131072),  # config.json's 40960 were left as they are
        ({**YARN, "factor": 1.0}, 40960),
        ({**YARN, "original_max_position_embeddings": 40960}, 163840),
        (LLAMA31, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 40960),
    ],
)
def test_the_positions_a_scaling_is_made_for(tmp_path: Path, rope: dict[str, Any], positions: int) -> None:
    assert read(tmp_path, rope, 64, 1e6, 40960, "rope_scaling").max_positions == positions


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_scaling.rope_type is 'longrope', which is not implemented; only 'default' or 'linear' or 'llama3' or "
            "'yarn' is",
        ),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type is 'proportional'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "type is 'linear', rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor must be a number from 1 to"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "rope_scaling.beta_fast is 1, which"),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 1.0}}, "rope_scaling.extrapolation_factor is 1.0, which"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "rope_scaling: beta_fast 1 is below beta_slow 2"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor 4 is not above low_freq_factor 4"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta 1 is not above 1, as rope_type 'yarn' needs"),
        ({"rope_scaling": {**YARN, "factor": 10000.0}}, "made for 327680000 positions, more than are supported"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "state different scalings: which is it?"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in refusal(make_target(tmp_path, config=config))


def test_both_spellings_may_agree(tmp_path: Path) -> None:
    both = {"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 1e4}}
    make_target(tmp_path, config=both)
    scaling = read_config(tmp_path).dims.rope_scaling
    assert scaling is not None and scaling.rope_type == "yarn"
