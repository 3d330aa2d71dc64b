"""Reading checkpoints: every storage form gives the same numbers; what cannot work is refused by name."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TARGET_DIMS, edit_json, make_drafter, make_target, random_weights, refusal, write_safetensors
from quantized import ALGORITHMS, projections, quantize
from safetensors.torch import load_file, save_file

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.drafters.dflash.dims import DFlashDims, default_tap_layers
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.families import QWEN2, QWEN3, Family

# What is read


@pytest.mark.parametrize(("dtype", "shards"), [("fp32", 1), ("fp16", 3), ("bf16", 3)])
def test_every_storage_form_gives_the_stored_values(tmp_path: Path, dtype: str, shards: int) -> None:
    checkpoint = load_checkpoint(make_target(tmp_path, dtype=dtype, shards=shards, tied=False))
    expected = random_weights(checkpoint_shapes(TARGET_DIMS, tied=False), seed=0)
    tolerance = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}[dtype]
    assert checkpoint.dims == TARGET_DIMS
    assert set(expected) == set(checkpoint.tensors)
    for name, values in expected.items():
        got = checkpoint.tensor(name)
        assert type(got) is np.ndarray and got.dtype == np.float32 and got.flags.writeable
        np.testing.assert_allclose(got, values, rtol=tolerance, atol=1e-7 if dtype == "fp16" else 0)


def test_tap_layers_default_when_the_config_names_none(tmp_path: Path) -> None:
    assert default_tap_layers(36, 5) == (1, 9, 17, 25, 33) and default_tap_layers(36, 1) == (18,)
    assert default_tap_layers(48, 8) == (1, 7, 14, 20, 26, 32, 39, 45)
    make_drafter(tmp_path, tap_layers=(1, 4), num_target_layers=7, config={"dflash_config": {"mask_token_id": 3}})
    dims = load_checkpoint(tmp_path).dims
    assert isinstance(dims, DFlashDims) and dims.tap_layers == (1, 4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 1e6}),
        ({"rope_theta": 1000000, "rope_scaling": None}, {"rope_theta": 1e6}),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "default"}}, {"rope_theta": 2e4}),
        ({"rope_theta": None}, {"rope_theta": 1e4}),
        # windows that are not in use
        ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, {}),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, {}),
    ],
)
def test_a_configuration_in_either_form(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert load_checkpoint(make_target(tmp_path, config=config)).dims == replace(TARGET_DIMS, **expected)


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_null_kv_heads_means_one_per_query_head(tmp_path: Path, family: Family) -> None:
    make_target(tmp_path, family=family, num_kv_heads=4)
    edit_json(tmp_path / "config.json", num_key_value_heads=None)
    assert load_checkpoint(tmp_path).dims.num_kv_heads == 4


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 5, (5,)), ({"eos_token_id": [7, 5, 7]}, 5, (7, 5)), ({"eos_token_id": None}, [3], (3,)), ({}, None, ())],
)
def test_stop_tokens(tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    make_target(tmp_path, config={"eos_token_id": config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_checkpoint(tmp_path).stop_token_ids == expected


def test_stop_tokens_of_both_files_are_checked(tmp_path: Path) -> None:
    make_target(tmp_path, config={"eos_token_id": -1})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert "/config.json: eos_token_id must be an integer from 0 to 95, found -1" in refusal(tmp_path)


def test_identity_covers_the_configuration_and_every_weight_file(tmp_path: Path) -> None:
    make_target(tmp_path, shards=2)
    calls: list[tuple[str, int, int]] = []
    checkpoint = load_checkpoint(tmp_path, name="me", revision="abc")
    identity = checkpoint.identify(lambda *call: calls.append(call))
    files = [tmp_path / "config.json", *sorted(tmp_path.glob("*.safetensors"))]
    assert identity.sha256 == hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    assert (identity.name, identity.revision) == ("me", "abc")
    assert calls[-1][1] == calls[-1][2] == sum(f.stat().st_size for f in files)


def test_tied_weights_stored_twice_and_buffers_are_no_mismatch(tmp_path: Path) -> None:
    make_target(tmp_path)
    weights = random_weights(checkpoint_shapes(TARGET_DIMS, tied=False), seed=0)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights, "fp32")
    assert "lm_head.weight" not in load_checkpoint(tmp_path).tensors


# What is refused


def test_no_checkpoint_and_no_weights(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (make_target(tmp_path) / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "found pytorch_model.bin: convert it" in refusal(tmp_path)


def test_shapes_and_names_are_checked_before_any_tensor_is_read(tmp_path: Path) -> None:
    make_target(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=64)
    message = refusal(tmp_path)
    assert "model.layers.0.mlp.gate_proj.weight has shape [48, 32]" in message and "calls for [64, 32]" in message
    edit_json(tmp_path / "config.json", intermediate_size=48, num_hidden_layers=4)
    message = refusal(tmp_path)
    assert "lacks model.layers.3." in message and "and 8 more" in message
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    assert "holds model.layers.2.input_layernorm.weight" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=3, tie_word_embeddings=False)
    assert "lacks lm_head.weight" in refusal(tmp_path)


def test_values_of_another_type(tmp_path: Path) -> None:
    file = make_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32","shape":[32]', b'"F64","shape":[16]'))
    assert "is stored as F64; supported" in refusal(tmp_path)


def test_incomplete_shards(tmp_path: Path) -> None:
    make_target(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    edit_json(index, weight_map={"model.norm.weight": "../elsewhere.safetensors"})
    assert "weight_map.'model.norm.weight' must be a name" in refusal(tmp_path)
    index.write_text("{}")
    assert "weight_map must name files beside it" in refusal(tmp_path)
    index.write_text(whole)
    placed = json.loads(whole)["weight_map"]
    swapped = "model-00001-of-00003.safetensors"
    assert placed["model.norm.weight"] != swapped
    edit_json(index, weight_map={**placed, "model.norm.weight": swapped})
    assert f"puts 'model.norm.weight' in {swapped}" in refusal(tmp_path)
    index.write_text(whole)
    (tmp_path / swapped).unlink()
    assert "is missing, but model.safetensors.index.json names it" in refusal(tmp_path)


@pytest.mark.parametrize(("bad", "dtype"), [(np.nan, "fp32"), (np.inf, "fp16"), (-np.inf, "bf16")])
def test_weights_that_are_not_finite(tmp_path: Path, bad: float, dtype: str) -> None:
    make_target(tmp_path)
    weights = random_weights(checkpoint_shapes(TARGET_DIMS, tied=True), seed=0)
    weights["model.layers.1.self_attn.k_proj.weight"][5, 7] = bad
    write_safetensors(tmp_path / "model.safetensors", weights, dtype)
    checkpoint = load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight\[5, 7\] is (nan|-?inf)"):
        checkpoint.tensor("model.layers.1.self_attn.k_proj.weight")


def test_a_file_that_shrinks_after_loading(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_target(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.tensor("model.norm.weight")
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.identify()


# Quantised checkpoints: what their tensors stand for, and what is refused by name


@pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION"])
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
        ({"group_size": 0}, "group_size must be an integer from 1 to 1048576, found 0"),
        ({"has_zero_point": True}, "has_zero_point is set, only symmetric quantisation can be read"),
        ({"exclude_modules": "lm_head"}, "exclude_modules must be a list, found 'lm_head'"),
    ],
)
def test_a_damaged_modelopt_configuration(tmp_path: Path, content: Any, message: str) -> None:
    make_target(tmp_path)
    section = {"quant_algo": "W4A16_AWQ", **content}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
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
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight_scale": _ONE}, "must be [48], and it has shape [1]"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight_scale": np.ones(48, np.uint8)}, "weight_scale is stored as U8"),
        ("W8A8_SQ_PER_CHANNEL", {"up_proj.weight": np.ones((48, 31), np.int8)}, "shape [48, 31], its config.json"),
        ("W8A16", {"q_proj.weight": np.zeros((32, 32), np.uint8)}, "is stored as U8, and the hf_quant_config.json"),
        ("W4A16_AWQ", {"up_proj.weight_scale": np.ones((48, 4), np.float32)}, "must be [48, 2], and it has shape"),
        ("W4A16_AWQ", {"up_proj.weight": np.zeros((48, 32), np.uint8)}, "calls for [24, 32]"),
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
    assert f"[64, 32] cannot be W4A16_AWQ, {whole}, of 24 values here" in refusal(uneven)
    scales = {"up_proj.weight_scale": np.ones((48, 5), np.float32)}
    untold = quantize(make_target(tmp_path / "b"), "W4A16_AWQ", config={"group_size": None}, replace=scales)
    assert whole in refusal(untold)
    odd = make_target(tmp_path / "c", intermediate_size=47)
    quantize(odd, "W4A16_AWQ", weights="q_proj.weight", replace={"gate_proj.weight": _HALVES})
    assert "gate_proj.weight [47, 32] cannot be" in refusal(odd)


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
