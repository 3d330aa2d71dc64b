"""Checkpoints that are incomplete or damaged, and pairs that do not fit: each is refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    TARGET_DIMS,
    edit_json,
    make_drafter,
    make_pair,
    make_target,
    random_weights,
    refusal,
    write_safetensors,
)
from fuzzing import damage, mutate_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.pair import check_pair
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import language_model_shapes


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


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_other_weight_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Never an exception other than the package's own, which is one line."""
    rng, target = random.Random(seed), tmp_path_factory.getbasetemp() / "mutated"
    if not target.exists():
        make_target(target, num_layers=1)
        shutil.copy(target / "model.safetensors", target / "whole")
    whole = (target / "whole").read_bytes()
    (target / "model.safetensors").write_bytes(rng.choice((damage, mutate_weights))(whole, rng))
    try:
        checkpoint = load_checkpoint(target)
        for name in checkpoint.tensors:
            checkpoint.tensor(name)
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 1500


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 97}, "vocab_size is 97, the target's 96"),
        ({"hidden_size": 16}, "hidden_size is 16, the target's 32"),
        ({"num_target_layers": 4}, "num_target_layers is 4, the target's layers 3"),
        ({"tap_layers": (0, 3)}, "target_layer_ids [3]"),
        ({"mask_token_id": 96}, "mask_token_id 96"),
    ],
)
def test_drafter_of_another_target(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = load_checkpoint(make_target(tmp_path / "target"))
    drafter = load_checkpoint(make_drafter(tmp_path / "drafter", **change))
    with pytest.raises(CheckpointError) as caught:
        check_pair(target, drafter)
    assert message in str(caught.value) and "use the drafter trained for this target" in str(caught.value)


def test_pairs_that_fit_and_swapped_roles(tmp_path: Path) -> None:
    pair: list[Checkpoint] = [load_checkpoint(d) for d in make_pair(tmp_path)]
    check_pair(*pair)
    with pytest.raises(CheckpointError, match="is a DFlash drafter, not a target"):
        check_pair(pair[1], pair[0])
