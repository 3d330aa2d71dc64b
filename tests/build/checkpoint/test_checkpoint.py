"""Reading checkpoints: every storage form gives the same numbers; what cannot work is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    TARGET_DIMS,
    edit_json,
    make_drafter,
    make_target,
    random_weights,
    refusal,
    write_safetensors,
)

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.drafters.dflash.dims import DFlashDims, default_tap_layers
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import EMBEDDING, language_model_shapes

# What is read


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_storage_form_gives_the_stored_values(tmp_path: Path, dtype: str, shards: int) -> None:
    checkpoint = load_checkpoint(make_target(tmp_path, dtype=dtype, shards=shards, tied=False))
    expected = random_weights(language_model_shapes(TARGET_DIMS, tied=False), seed=0)
    tolerance = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}[dtype]
    assert checkpoint.dims == TARGET_DIMS
    assert set(expected) == set(checkpoint.tensors)
    for name, values in expected.items():
        got = checkpoint.tensor(name)
        assert type(got) is np.ndarray and got.dtype == np.float32 and got.flags.writeable
        np.testing.assert_allclose(got, values, rtol=tolerance, atol=1e-7 if dtype == "fp16" else 0)


def test_bf16_is_widened_exactly(tmp_path: Path) -> None:
    """Every finite bfloat16, subnormals and both zeros included, is the float32 whose upper half it is."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    finite = bits[(bits >> 7) & 0xFF != 0xFF] << 16
    values = finite.astype(np.uint32).view(np.float32)
    make_target(tmp_path, vocab_size=len(values) // 32, hidden_size=32)
    weights = random_weights(language_model_shapes(load_checkpoint(tmp_path).dims, tied=True), seed=0)
    weights[EMBEDDING] = values.reshape(-1, 32)
    write_safetensors(tmp_path / "model.safetensors", weights, "bf16")
    got = load_checkpoint(tmp_path).tensor(EMBEDDING)
    np.testing.assert_array_equal(got.view(np.uint32).reshape(-1), finite)


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (28, 5, (1, 7, 13, 19, 25)), (48, 8, (1, 7, 14, 20, 26, 32, 39, 45))],
)
def test_default_tap_layers(target_layers: int, draft_layers: int, expected: tuple[int, ...]) -> None:
    assert default_tap_layers(target_layers, draft_layers) == expected


def test_tap_layers_default_when_the_config_names_none(tmp_path: Path) -> None:
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
def test_a_configuration_is_read_in_either_form(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert load_checkpoint(make_target(tmp_path, config=config)).dims == replace(TARGET_DIMS, **expected)


def test_null_kv_heads_means_one_per_query_head(tmp_path: Path) -> None:
    make_target(tmp_path, num_kv_heads=4)
    edit_json(tmp_path / "config.json", num_key_value_heads=None)
    assert load_checkpoint(tmp_path).dims.num_kv_heads == 4


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 5, (5,)),
        ({"eos_token_id": [7, 5, 7]}, 5, (7, 5)),
        ({"eos_token_id": None}, [3], (3,)),
        ({}, None, ()),
    ],
)
def test_stop_tokens(tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    make_target(tmp_path, config={"eos_token_id": config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_checkpoint(tmp_path).stop_token_ids == expected


@pytest.mark.parametrize("wrong", [{}, -1, 10**9])
def test_stop_tokens_of_both_files_are_checked(tmp_path: Path, wrong: Any) -> None:
    make_target(tmp_path, config={"eos_token_id": wrong})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert f"/config.json: eos_token_id must be an integer from 0 to 95, found {wrong}" in refusal(tmp_path)


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
    weights = random_weights(language_model_shapes(TARGET_DIMS, tied=False), seed=0)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights, "fp32")
    assert "lm_head.weight" not in load_checkpoint(tmp_path).tensors


# What is refused


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)


# What is refused: weight files


def test_no_weights(tmp_path: Path) -> None:
    make_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "found pytorch_model.bin: convert it" in refusal(tmp_path)


def test_shapes_and_names_are_checked_before_any_tensor_is_read(tmp_path: Path) -> None:
    make_target(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=64)
    message = refusal(tmp_path)
    assert "model.layers.0.mlp.gate_proj.weight has shape [48, 32]" in message and "calls for [64, 32]" in message
    edit_json(tmp_path / "config.json", intermediate_size=48, num_hidden_layers=4)
    assert "lacks model.layers.3.input_layernorm.weight" in refusal(tmp_path)
    assert "and 8 more" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    assert "holds model.layers.2.input_layernorm.weight" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=3, tie_word_embeddings=False)
    assert "lacks lm_head.weight" in refusal(tmp_path)


# A refusal by what a published file may have; what no writer makes is `test_tensor_files`'.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-4], "the file is damaged or cut short"),
        (lambda data: data[:100], "the file is damaged or cut short"),
        (lambda data: b"", "the file is damaged or cut short"),
        (lambda data: data + b"junk", "the file is damaged or cut short"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda data: data.replace(b'"F32","shape":[32]', b'"F64","shape":[16]'), "is stored as F64; supported"),
    ],
)  # fmt: skip
def test_damaged_weight_files(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    file = make_target(tmp_path) / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert message in refusal(tmp_path)


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_weights_that_are_not_finite(tmp_path: Path, bad: float, dtype: str) -> None:
    make_target(tmp_path)
    weights = random_weights(language_model_shapes(TARGET_DIMS, tied=True), seed=0)
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


# Pairs
