"""Checkpoints that are incomplete or damaged, and pairs that do not fit: each is refused by name."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any, get_type_hints

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

from ddtree_trt.build.checkpoint.reader import Checkpoint, check_pair, load_checkpoint
from ddtree_trt.build.checkpoint.tensorfile import open_tensors
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import language_model_shapes


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: it is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(tmp_path)


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


def edit_header(file: Path, change: Any) -> None:
    """Rewrite a safetensors header through `change(header)`, leaving the data as it is."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_damaged_weight_files(tmp_path: Path) -> None:
    file = make_target(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert "model.norm.weight ends 4 bytes behind the end of the file" in refusal(tmp_path)
    for cut in (0, 4, 100):
        file.write_bytes(whole[:cut])
        assert "damaged or cut short" in refusal(tmp_path)
    file.write_bytes(whole[:8] + b"\xff" + whole[9:])
    assert "damaged or cut short" in refusal(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(tmp_path)
    file.write_bytes(whole)
    edit_header(file, lambda h: h["model.norm.weight"].update(data_offsets=[0, 4]))
    assert "model.norm.weight [32] F32 has 4 bytes" in refusal(tmp_path)
    file.write_bytes(whole)
    edit_header(file, lambda h: h["model.norm.weight"].pop("shape"))
    assert "damaged or cut short" in refusal(tmp_path)
    file.write_bytes(whole)
    edit_header(file, lambda h: h["model.norm.weight"].update(dtype="F8_E5M2"))
    assert "model.norm.weight is stored as F8_E5M2" in refusal(tmp_path)


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


# Headers that lie


def swapped(header: dict[str, Any], name: str, **changes: Any) -> None:
    header[name] = {**header[name], **changes}


def stacked(header: dict[str, Any]) -> None:
    """All tensors at the beginning of the data."""
    for name in header.keys() - {"__metadata__"}:
        begin, end = header[name]["data_offsets"]
        swapped(header, name, data_offsets=[0, end - begin])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: stacked(h), "begins at byte 0 of the data, where"),
        (lambda h: swapped(h, "model.norm.weight", data_offsets=[0, 128]), "begins at byte 0 of the data, where"),
        (lambda h: h.pop("model.layers.0.mlp.up_proj.weight"), "of the data, where"),
        (lambda h: h.pop(list(h)[-1]), "bytes behind its last tensor belong to none"),
        (lambda h: swapped(h, "model.norm.weight", data_offsets=[0.0, 128.0]), "data_offsets[0] must be an integer"),
        (lambda h: swapped(h, "model.norm.weight", data_offsets=["0", "128"]), "data_offsets[0] must be an integer"),
        (lambda h: swapped(h, "model.norm.weight", data_offsets=[128, 0]), "has -128 bytes"),
        (lambda h: swapped(h, "model.norm.weight", data_offsets=[0]), "data_offsets must be a list of 2 entries"),
        (lambda h: swapped(h, "model.norm.weight", shape=[1 << 60]), "shape[0] must be an integer from 0 to"),
        (lambda h: swapped(h, "model.norm.weight", shape=[-32]), "shape[0] must be an integer from 0 to"),
        (lambda h: swapped(h, "model.norm.weight", shape=[1] * 5000 + [32]), "has 5001 axes"),
        (lambda h: swapped(h, "model.norm.weight", shape="32"), "shape must be a list, found '32'"),
        (lambda h: swapped(h, "model.norm.weight", dtype="\x1b[2J"), "must be a type of safetensors, found '\\x1b[2J'"),
        (lambda h: swapped(h, "model.norm.weight", colour=1), "has unknown fields ['colour']"),
        (lambda h: h.update({"a\nb": h["model.norm.weight"]}), "'a\\nb' is no name of a tensor"),
        (lambda h: h.update({"x": 5}), "x must be an object, found 5"),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, change: Any, message: str) -> None:
    file = make_target(tmp_path) / "model.safetensors"
    edit_header(file, change)
    assert message in refusal(tmp_path)


def test_a_header_of_very_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type hints are evaluated once for all its entries; beyond the limit none is looked at."""
    file = make_target(tmp_path, num_layers=1) / "model.safetensors"
    evaluated = []

    def noted(cls: type, **options: Any) -> dict[str, Any]:
        evaluated.append(cls)
        return get_type_hints(cls, **options)

    monkeypatch.setattr("ddtree_trt.reading.typing.get_type_hints", noted)
    assert len(open_tensors(tmp_path)) > 2 and len(evaluated) <= 1
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    edit_header(file, lambda h: h.update({f"t{i}": empty for i in range(100_001)}))
    with pytest.raises(CheckpointError, match=r"its header names \d+ tensors, at most 100000 are supported"):
        open_tensors(tmp_path)


def test_files_with_something_behind_them(tmp_path: Path) -> None:
    file = make_target(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"junk")
    assert "4 bytes behind its last tensor belong to none" in refusal(tmp_path)
    length = struct.unpack("<Q", whole[:8])[0]
    for text in (b'{"a":' * 100_000, b"[]", b'{"a": NaN}', whole[8 : 8 + length].rstrip() + b"x"):
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        assert "damaged or cut short" in refusal(tmp_path)
    twin = whole[8 : 8 + length].rstrip()[:-1] + b', "model.norm.weight": {}}'
    file.write_bytes(struct.pack("<Q", len(twin)) + twin + whole[8 + length :])
    assert "'model.norm.weight' is there twice" in refusal(tmp_path)
