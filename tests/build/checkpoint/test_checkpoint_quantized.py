"""Quantised checkpoints: what their tensors stand for, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_target, refusal
from quantized import ALGORITHMS, projections, quantize
from safetensors.torch import load_file, save_file

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.errors import CheckpointError


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_AWQ", "MIXED_PRECISION", "FP8_PB_WO"])
def test_other_quantisations_of_modelopt(tmp_path: Path, algorithm: str) -> None:
    make_target(tmp_path / "a")
    (tmp_path / "a" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    for path in (tmp_path / "a", make_target(tmp_path / "b", config=config)):
        message = refusal(path)
        assert f"quantised by {algorithm!r}, which cannot be read; use FP8, " in message
        assert all(readable in message for readable in ALGORITHMS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "hf_quant_config.json: it is not a JSON object but []"),
        ({"quantization": "FP8"}, "hf_quant_config.json: quantization must be an object, found 'FP8'"),
        ({"group_size": 0}, "group_size must be an integer from 1 to 1048576, found 0"),
        ({"group_size": "128"}, "group_size must be an integer from 1 to 1048576, found '128'"),
        ({"has_zero_point": True}, "has_zero_point is set, only symmetric quantisation can be read"),
        ({"exclude_modules": "lm_head"}, "exclude_modules must be a list, found 'lm_head'"),
    ],
)
def test_a_damaged_modelopt_configuration(tmp_path: Path, content: Any, message: str) -> None:
    make_target(tmp_path)
    if isinstance(content, dict) and "quantization" not in content:
        content = {"quantization": {"quant_algo": "W4A16_AWQ", **content}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_quantised_tensors_stand_for(tmp_path: Path, algorithm: str) -> None:
    plain = load_checkpoint(make_target(tmp_path / "plain", tied=False))
    smooth = ("o_proj",) if algorithm in ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ") else ()
    quantized = quantize(make_target(tmp_path / "quantized", tied=False), algorithm, smooth=smooth)
    checkpoint, truth = load_checkpoint(quantized), projections(quantized)
    assert checkpoint.quantizers and not plain.quantizers
    assert checkpoint.num_values == plain.num_values
    assert {name for name in plain.tensors if name.endswith("_proj.weight")} == set(truth)
    for name in plain.tensors:
        found, exact, scales = checkpoint.tensor(name), plain.tensor(name), checkpoint.scales(name)
        if name not in truth:
            assert scales is None
            np.testing.assert_array_equal(found, exact)
            continue
        assert scales is not None and (scales.input is None) == (truth[name].step is None)
        assert (scales.smooth is not None) == name.removesuffix(".weight").endswith(smooth or ("none",))
        np.testing.assert_allclose(found, (truth[name].weight * truth[name].smooth).numpy(), rtol=1e-6)
        step = {"FP8": 1 / 16, "W4A16_AWQ": 1 / 14 * 3}.get(algorithm, 1 / 254 * 3)  # smoothing widens the range
        assert np.abs(found - exact).max() <= np.abs(exact).max() * step


@pytest.mark.parametrize("algorithm", ["W8A16", "W4A16_AWQ"])
def test_every_byte_is_read_as_it_is(tmp_path: Path, algorithm: str) -> None:
    """The lowest value that rounding never makes included; of INT4 every pair, the even row in the low bits."""
    name, groups = "model.layers.0.mlp.gate_proj.weight", 1 if algorithm == "W8A16" else 2
    every = np.resize(np.arange(256, dtype=np.uint8), (48 // groups, 32))
    scale = np.ones((48, 2)[:groups], np.float32)
    replace: dict[str, Any] = {name: every.view(np.int8) if groups == 1 else every, f"{name}_scale": scale}
    found = load_checkpoint(quantize(make_target(tmp_path), algorithm, replace=replace)).tensor(name)
    for row, bits in enumerate([every] if groups == 1 else [every & 15, every >> 4]):
        half = 256 >> 4 * (groups - 1) >> 1
        np.testing.assert_array_equal(found[row::groups], np.where(bits < half, bits, bits.astype(int) - 2 * half))


_ONE, _HALVES = np.ones(1, np.float32), np.zeros((23, 32), np.uint8)


@pytest.mark.parametrize(
    ("algorithm", "replace", "message"),
    [
        ("FP8", {"o_proj.weight_scale": None}, "o_proj.weight_scale must be one number, and it is missing"),
        ("FP8", {"down_proj.input_scale": np.ones(3, np.float32)}, "must be one number, and it has shape [3]"),
        ("FP8", {"o_proj.weight": np.ones((32, 64), np.int8)}, "o_proj.weight is stored as I8"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.input_scale": None}, "input_scale must be one number, and it is missing"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight_scale": _ONE}, "must be [48], and it has shape [1]"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight_scale": np.ones(48, np.uint8)}, "weight_scale is stored as U8"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.pre_quant_scale": _ONE}, "must be [32], and it has shape [1]"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight": np.ones((48, 31), np.int8)}, "shape [48, 31], its config.json"),
        ("W8A16", {"up_proj.weight_scale": None}, "up_proj.weight_scale must be [48], and it is missing"),
        ("W8A16", {"q_proj.weight": np.zeros((32, 32), np.uint8)}, "is stored as U8, and the hf_quant_config.json"),
        ("W4A16_AWQ", {"up_proj.weight_scale": None}, "up_proj.weight_scale must be [48, 2], and it is missing"),
        ("W4A16_AWQ", {"up_proj.weight_scale": np.ones((48, 4), np.float32)}, "must be [48, 2], and it has shape"),
        ("W4A16_AWQ", {"up_proj.weight": np.zeros((48, 32), np.uint8)}, "calls for [24, 32]"),
        ("W4A16_AWQ", {"up_proj.pre_quant_scale": np.ones((32, 1), np.float32)}, "must be [32], and it has shape"),
    ],
)
def test_quantised_without_what_belongs_to_it(
    tmp_path: Path, algorithm: str, replace: dict[str, np.ndarray | None], message: str
) -> None:
    smooth = ("up_proj",) if algorithm in ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ") else ()
    assert message in refusal(quantize(make_target(tmp_path), algorithm, replace=replace, smooth=smooth))


def test_groups_that_do_not_come_out_even(tmp_path: Path) -> None:
    whole = "which packs two rows in one and has rows of whole groups"
    uneven = quantize(make_target(tmp_path / "a"), "W4A16_AWQ", config={"group_size": 24})
    message = refusal(uneven)
    assert f"[64, 32] cannot be W4A16_AWQ, {whole}, of 24 values here" in message
    scales = {"up_proj.weight_scale": np.ones((48, 5), np.float32)}
    untold = quantize(make_target(tmp_path / "b"), "W4A16_AWQ", config={"group_size": None}, replace=scales)
    assert whole in refusal(untold)
    odd = make_target(tmp_path / "c", intermediate_size=47)
    quantize(odd, "W4A16_AWQ", weights="q_proj.weight", replace={"gate_proj.weight": _HALVES})
    assert "gate_proj.weight [47, 32] cannot be" in refusal(odd)


def test_smoothing_where_there_is_none(tmp_path: Path) -> None:
    smoothed = quantize(make_target(tmp_path), "W8A16", smooth=("o_proj",))
    assert "o_proj.pre_quant_scale" in refusal(smoothed)


@pytest.mark.parametrize("kind", ["weight_scale", "input_scale", "pre_quant_scale"])
def test_a_scale_of_zero(tmp_path: Path, kind: str) -> None:
    name = "model.layers.0.self_attn.o_proj"
    shape = {"weight_scale": (32,), "input_scale": (), "pre_quant_scale": (64,)}[kind]
    values = np.ones(shape, np.float32)
    values[(-1,) * len(shape)] = 0
    replace = {f"{name}.{kind}": values}
    target = quantize(make_target(tmp_path), "W8A8_SQ_PER_CHANNEL", smooth=("o_proj",), replace=replace)
    with pytest.raises(CheckpointError, match=rf"{kind} is 0, a scale must be positive"):
        load_checkpoint(target).tensor(f"{name}.weight")


def test_fp8_that_is_not_a_number(tmp_path: Path) -> None:
    target = quantize(make_target(tmp_path))
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"o_proj.weight\[3, 5\] is nan; weights must be finite"):
        load_checkpoint(target).tensor(name)


def test_only_projections_may_be_quantised(tmp_path: Path) -> None:
    message = refusal(quantize(make_target(tmp_path), weights="model.norm.weight"))
    assert "model.norm.weight is stored as F8_E4M3; only projections" in message


@pytest.mark.parametrize(("said", "told"), [(None, "is not there"), ("W8A16", "is for W8A16")])
def test_quantised_weights_that_no_configuration_explains(tmp_path: Path, said: str | None, told: str) -> None:
    quantize(make_target(tmp_path), config={"quant_algo": said})
    message = refusal(tmp_path)
    assert f"is stored as F8_E4M3, and the hf_quant_config.json that would say how to read it {told}" in message
