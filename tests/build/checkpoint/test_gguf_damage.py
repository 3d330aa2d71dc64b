"""GGUF files that are damaged, incomplete or not supported: each is refused by name, in one line, before any work."""

from __future__ import annotations

import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_target, refusal
from fuzzing import damage
from gguf_files import make_gguf, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_trt.build.checkpoint.gguf import files
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.checkpoint.tokenizer import find_tokenizer
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.errors import CheckpointError, DDTreeError, MissingDependency
from ddtree_trt.models.families import LLAMA, QWEN2


@pytest.fixture(autouse=True)
def headers_are_read_each_time() -> None:
    """Files are rewritten here within one tick of the file system's clock."""
    files._parse_header.cache_clear()


def refusal_of(file: Path, data: bytes) -> str:
    """The line with which a file of these bytes is refused."""
    file.write_bytes(data)
    files._parse_header.cache_clear()
    return refusal(file)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", intermediate_size=64)


@pytest.fixture
def file(target: Path, tmp_path: Path) -> Path:
    return make_gguf(target, tmp_path / "model.gguf", "Q8_0")


def test_no_such_file(tmp_path: Path, file: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == f"no checkpoint at {tmp_path / 'no.gguf'}: there is no such file"
    assert "has no config.json; found model.gguf: give the file itself" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "is not a GGUF file: it begins with b'', not with b'GGUF'; give a GGUF file, or the directory"),
        (b"version https://git-lfs", "is a Git LFS pointer, not the weights; run: git lfs pull"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "its numbers are big-endian; the file is damaged or cut short"),
        (b"GGUF", "it goes on behind the end of the file, at byte 4; the file is damaged or cut short, fetch it again"),
    ],
)
def test_what_is_no_gguf_file(start: bytes, message: str, tmp_path: Path) -> None:
    for name in ("model.gguf", "config.json"):
        assert message in refusal_of(tmp_path / name, start)


def test_a_file_that_changes_after_its_header_was_read(file: Path) -> None:
    read = load_checkpoint(file)
    os.truncate(file, 4096)
    for name in read.shapes:  # quantised and plain ones
        with pytest.raises(CheckpointError, match=f"{file} changed while it was read: "):
            read.tensor(name)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} changed while it was read: .*No such file"):
        read.tensor(name)


def test_damaged_counts_do_not_count(file: Path) -> None:
    data = file.read_bytes()
    numbers = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    for place in (8, 16, 24, numbers):  # tensors, keys, the first key's length, a list
        for count in (1 << 40, (1 << 64) - 1):
            changed = data[:place] + struct.pack("<Q", count) + data[place + 8 :]
            assert "the file is damaged or cut short" in refusal_of(file, changed)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_other_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Never an exception other than the package's own, which is one line."""
    whole, rng = tmp_path_factory.getbasetemp() / "whole.gguf", random.Random(seed)
    if not whole.exists():
        make_gguf(make_target(whole.with_name("plain"), intermediate_size=64, num_layers=1), whole, "Q8_0")
    data, header = whole.read_bytes(), rng.randrange(100, 4000)
    file = whole.with_name("damaged.gguf")
    file.write_bytes(damage(data[:header], rng) + data[header:])
    files._parse_header.cache_clear()
    try:
        checkpoint = load_checkpoint(file)
        find_tokenizer(file)
        for name in checkpoint.tensors:
            checkpoint.tensor(name)
    except DDTreeError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "lacks blk.1.attn_k.weight"),
        ({"blk.0.attn_sinks.weight": np.ones(4, "f4")}, "holds blk.0.attn_sinks.weight, which its metadata has no"),
        ({"blk.2.ffn_up.weight": np.ones((32, 32), "f4")}, "shape [32, 32], its metadata calls for [64, 32]; use the"),
        ({"rope_freqs.weight": np.array([1, 1, 8, 8], "f4")}, "rope_freqs.weight scales positions in another way"),
        ({"output_norm.weight": np.ones((1, 1, 1, 1, 32), "f4")}, "output_norm.weight has shape [1, 1, 1, 1, 32]"),
    ],
)
def test_tensors_that_do_not_belong(tensors: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    assert message in refusal(make_gguf(target, tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_weights_must_be_finite(kind: str, target: Path, tmp_path: Path) -> None:
    values = tensors_of(target)["blk.1.ffn_up.weight"].copy()
    values[3, 5] = np.inf
    with np.errstate(all="ignore"):
        file = make_gguf(target, tmp_path / "m.gguf", kind, tensors={"blk.1.ffn_up.weight": values})
    checkpoint = load_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight\[3, \d+\] is .*; weights must be finite"):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")


def test_types_that_cannot_be_converted(target: Path, tmp_path: Path) -> None:
    name = "blk.0.ffn_up.weight"
    drawn = np.zeros((64, 32), np.int8)
    message = refusal(make_gguf(target, tmp_path / "m.gguf", raw={name: (drawn, "I8")}))
    assert f"{name} is stored as I8, which the installed gguf package cannot convert; use a file of" in message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "'general.architecture' is 'gemma3', only dense Qwen3"),
        ({"qwen3.block_count": None}, "it has no qwen3.block_count"),
        ({"qwen3.block_count": 4}, "lacks blk.3."),
        ({"qwen3.attention.key_length": 8}, "attention.value_length' is 16, which is not implemented; only 8 is"),
        ({"qwen3.vocab_size": 100}, "'qwen3.vocab_size' is 100, but token_embd.weight has 96 rows"),
        ({"qwen3.attention.sliding_window": 512}, "attention.sliding_window' is 512, which is not implemented; only 0"),
        ({"qwen3.attention.scale": 0.5}, "'qwen3.attention.scale' is 0.5, which is not implemented"),
        ({"tokenizer.ggml.eos_token_id": 96}, "ggml.eos_token_id' must be an integer from 0 to 95, found 96"),
        ({"general.alignmenX": 48}, "Invalid alignment: must be a non-zero power of two"),
    ],
)  # fmt: skip
def test_metadata(metadata: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    file = make_gguf(target, tmp_path / "m.gguf", metadata=metadata)
    data = file.read_bytes().replace(b"general.alignmenX", b"general.alignment")  # which gguf's writer would use
    assert message in refusal_of(file, data)


def test_neutral_metadata(target: Path, tmp_path: Path) -> None:
    neutral = {"rope.scaling.type": "none", "expert_count": 0, "attention.causal": True, "vocab_size": 96}
    file = make_gguf(target, tmp_path / "m.gguf", metadata={f"qwen3.{k}": v for k, v in neutral.items()})
    assert load_checkpoint(file).dims == load_checkpoint(target).dims


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=lambda family: family.model_type)
def test_what_a_file_may_leave_out(family: Any, tmp_path: Path) -> None:
    """As llama.cpp fills it in, which is not what config.json's defaults would be."""
    target = make_target(tmp_path / "t", family=family, num_kv_heads=4, hidden_size=64, rope_theta=10000.0)
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    without = {f"{family.model_type}.{name}": None for name in names}
    file = make_gguf(target, tmp_path / "m.gguf", metadata=without)
    assert load_checkpoint(file).dims == load_checkpoint(target).dims


def test_parts_of_a_split_file(target: Path, tmp_path: Path) -> None:
    first = make_gguf(target, tmp_path / "m.gguf", split=12)
    second, third = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (2, 3))
    assert f"is not the first of 3 parts; give {first}" in refusal(second)
    data = second.read_bytes()
    second.unlink()
    assert "is one of 3 parts, and 'm-00002-of-00003.gguf' is not beside it; fetch all 3" in refusal(first)
    second.write_bytes(third.read_bytes())
    assert "is in an earlier part too" in refusal(first)
    second.write_bytes(data[: len(data) // 2])
    assert f"{second.name}: " in refusal(first) and "cut short" in refusal(first)
    second.write_bytes(make_gguf(target, tmp_path / "whole.gguf").read_bytes())
    assert "split.count is null, but 3 in the first part" in refusal(first)
    second.write_bytes(data)
    renamed = first.rename(tmp_path / "renamed.gguf")
    assert "is one of 3 parts, so it must be named NAME-00001-of-00003.gguf" in refusal(renamed)


def test_without_the_gguf_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    request = BuildRequest(checkpoint=file, drafter=tmp_path, output=tmp_path / "engine")
    advice = r"need the Python package gguf; .*pip install --editable '\.\[gguf\]'"
    for work in (compile_engine, dry_run):
        with pytest.raises(MissingDependency, match=advice):
            work(request)
