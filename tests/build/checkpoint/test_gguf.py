"""GGUF files of random checkpoints: the same configuration, tensors and engine as from safetensors."""

import hashlib
import os
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import STOP_TOKEN, make_target, refusal
from fuzzing import damage
from gguf_files import make_gguf, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.checkpoint.gguf import files
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint, load_config
from ddtree_trt.build.checkpoint.tokenizer import find_tokenizer
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.errors import CheckpointError, DDTreeError, MissingDependency
from ddtree_trt.models.decoder import Part, language_model_stored
from ddtree_trt.models.families import LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT

ALL = {family.model_type: family for family in (QWEN3, LLAMA, QWEN2)}
# Rows of whole blocks of every type that NumPy code can quantise to; K types have blocks of 256.
SIZES: dict[str, Any] = {"intermediate_size": 64}
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 16, "num_layers": 1}


def pair(path: Path, kind: str = "F32", **options: Any) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint as safetensors, and the same as a GGUF file."""
    directory = make_target(path / "target", **{**SIZES, **options})
    return load_checkpoint(directory), load_checkpoint(make_gguf(directory, path / "model.gguf", kind))


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, False) for family in (*ALL.values(), QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)), (QWEN3, True)],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_file_is_its_checkpoint(family: Any, tied: bool, tmp_path: Path) -> None:
    plain, read = pair(tmp_path, family=family, tied=tied)
    if not family.experts:  # which a file has in one tensor
        assert load_config(tmp_path / "model.gguf") == load_config(tmp_path / "target")
    assert read.tie_word_embeddings == tied
    assert read.stop_token_ids == plain.stop_token_ids == (STOP_TOKEN,)
    assert read.name == "model.gguf" and read.quantization is None
    assert read.identify().sha256 == hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest()
    assert_same_values(read, plain)


def assert_same_values(read: Checkpoint, plain: Checkpoint) -> None:
    """Part by part, which joins what one of the two has apart."""
    parts = [[*stored_parts(checkpoint)] for checkpoint in (read, plain)]
    for one, other in zip(*parts, strict=True):
        assert (one.name, one.shape) == (other.name, other.shape)
        found, expected = (
            np.concatenate([checkpoint.tensor(name).reshape(-1) for name in part.sources])
            for checkpoint, part in ((read, one), (plain, other))
        )
        np.testing.assert_array_equal(found, expected, err_msg=one.name)


def stored_parts(checkpoint: Checkpoint) -> Iterator[Part]:
    return language_model_stored(checkpoint.dims, tied=checkpoint.tie_word_embeddings)


def test_a_type_of_large_blocks(tmp_path: Path) -> None:
    """Nothing at hand quantises to it, so bytes are drawn; the file's are compared with the package's."""
    directory, number = make_target(tmp_path / "target", **LARGE), gguf.GGMLQuantizationType.Q4_K
    drawn = np.random.default_rng(0).integers(0, 256, (256, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    drawn[:, :4] = np.frombuffer(np.float16(0.01).tobytes() * 2, np.uint8)  # two scales, which must be finite
    read = load_checkpoint(make_gguf(directory, tmp_path / "m.gguf", raw={"blk.0.ffn_up.weight": (drawn, "Q4_K")}))
    expected = gguf.dequantize(drawn, number)
    np.testing.assert_array_equal(read.tensor("model.layers.0.mlp.up_proj.weight"), expected)
    assert len(np.unique(expected)) > 10


def test_layers_of_a_hybrid_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    """They follow the others and are counted with them."""
    directory = make_target(tmp_path / "target", family=QWEN3_5)
    more = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((2, 2), np.float32)}
    assert load_checkpoint(make_gguf(directory, tmp_path / "m.gguf", metadata=more, tensors=extra)).dims.num_layers == 3
    del more["qwen35.nextn_predict_layers"]
    assert "lacks" in refusal(make_gguf(directory, tmp_path / "n.gguf", metadata=more, tensors=extra))
    wrong = {"qwen35.ssm.inner_size": 130}
    assert "no multiple of qwen35.ssm.time_step_rank 4" in refusal(
        make_gguf(directory, tmp_path / "o.gguf", metadata=wrong)
    )


def test_gates_and_ups_of_experts_in_one_tensor(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "target", family=QWEN3_5_MOE)
    apart: dict[str, Any] = {n: v for n, v in tensors_of(directory).items() if "gate_exps" in n or "up_exps" in n}
    joined = {
        name.replace("gate", "gate_up"): np.concatenate([apart[name], apart[name.replace("gate", "up")]], axis=1)
        for name in apart
        if "gate" in name
    }
    read = load_checkpoint(make_gguf(directory, tmp_path / "m.gguf", tensors={**dict.fromkeys(apart), **joined}))
    assert_same_values(read, load_checkpoint(directory))


def build(target: Path, drafter: Path, engine: Path, **options: Any) -> Manifest:
    return compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=engine, **options))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_values(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package converts them, a few rows at a time here, in Hugging Face's order."""
    monkeypatch.setattr(files, "_ROWS_BYTES", 100)
    plain, read = pair(tmp_path, kind, family=LLAMA)
    number = gguf.GGMLQuantizationType[kind]
    for name in plain.shapes:
        values = plain.tensor(name)
        expected = gguf.dequantize(gguf.quantize(values, number), number) if values.ndim == 2 else values
        np.testing.assert_array_equal(read.tensor(name), expected, err_msg=name)


def test_an_autoregressive_drafter(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", **SIZES)
    small = make_target(tmp_path / "small", seed=1, num_layers=1, **SIZES)
    file = make_gguf(target, tmp_path / "target.gguf")
    manifest = build(file, make_gguf(small, tmp_path / "small.gguf"), tmp_path / "read")
    assert manifest.drafter_kind == "autoregressive" and manifest.drafter.name == "small.gguf"
    assert build(target, small, tmp_path / "plain").files["weights.bin"] == manifest.files["weights.bin"]
    assert "--checkpoint FILE.gguf --drafter FILE.gguf" in rebuild_command(tmp_path / "read", manifest)


# Scaled positions: the config.json they stand for, transformers' frequencies, and what is refused


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


def target_of(path: Path, **config: Any) -> Path:
    shape: dict[str, Any] = {"head_dim": HEAD_DIM, "rope_theta": THETA, "intermediate_size": 64}
    return make_target(path / "t", family=LLAMA, config=config, **shape)


def scaled(path: Path, entries: Mapping[str, Any], divisors: Any = None) -> Path:
    """A GGUF file with these keys of a scaling, or the tensor of divisors."""
    metadata = {f"llama.rope.scaling.{key}": value for key, value in entries.items()}
    tensors = {} if divisors is None else {"rope_freqs.weight": divisors.astype(np.float32)}
    return make_gguf(target_of(path), path / "m.gguf", metadata=metadata, tensors=tensors)


@pytest.mark.parametrize("name", STATED)
def test_metadata_is_its_configuration(name: str, tmp_path: Path) -> None:
    entries, scaling = STATED[name]
    expected = load_checkpoint(target_of(tmp_path / "scaled", rope_scaling=scaling)).dims
    assert expected.rope_scaling and load_checkpoint(scaled(tmp_path, entries)).dims == expected


@pytest.mark.parametrize(
    ("entries", "divisors"),
    [
        ({"type": "none", "factor": 4.0, "yarn_beta_fast": 8.0}, None),
        ({"type": "linear"}, None),
        ({"type": "yarn", "factor": 1.0}, None),
        ({}, np.ones(HEAD_DIM // 2)),
    ],
)
def test_a_scaling_that_changes_nothing(entries: dict[str, Any], divisors: Any, tmp_path: Path) -> None:
    assert load_checkpoint(scaled(tmp_path, entries, divisors)).dims == load_checkpoint(tmp_path / "t").dims


def divisors(factor: float, positions: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes for a llama3 scaling, by transformers' frequencies."""
    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": positions, "rope_theta": THETA}
    sizes: Any = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": positions}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**sizes, rope_parameters=scaling), torch.device("cpu"))
    plain = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_are_llama_3s_scaling(factor: float, tmp_path: Path) -> None:
    values = divisors(factor)
    assert values.min() == 1 and ((values > 1.01) & (values < factor - 0.01)).any()
    checkpoint = load_checkpoint(scaled(tmp_path, {}, divisors=values))
    scaling = checkpoint.dims.rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("llama3", factor)
    assert (scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor) == (8192, 1, 4)
    assert "rope_freqs.weight" not in checkpoint.shapes


@pytest.mark.parametrize(
    "values",
    [
        divisors(8.0, positions=4096),
        divisors(8.0)[:-1],
        np.where(np.arange(HEAD_DIM // 2) == 9, 1.1, 1) * divisors(8.0),
        np.full(HEAD_DIM // 2, np.nan),
    ],
    ids=["positions", "few", "one-off", "nan"],
)
def test_other_divisors_are_refused(values: np.ndarray, tmp_path: Path) -> None:
    assert "rope_freqs.weight" in refusal(scaled(tmp_path, {}, divisors=values))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, "type' is 'longrope', which is not implemented; only linear and yarn"),
        ({"type": "yarn"}, "'llama.rope.scaling' has no factor"),
        ({"type": "linear", "factor": 2.0}, "both llama.rope.scaling.* and rope_freqs.weight scale positions: which"),
        ({"type": "yarn", "factor": 0.5}, "'llama.rope.scaling'.factor must be a number from 1 to"),
        ({"type": "linear", "factor": 4.0, "alpha": 2.0}, "rope.scaling.alpha' is 2.0, which is not implemented"),
        ({"type": "none", "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1 is"),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 0.5}, "beta_fast 0.5 is below beta_slow 1"),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0}, "yarn_ext_factor' is 0.0, which is not implemented"),
    ],
)  # fmt: skip
def test_other_scalings_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(scaled(tmp_path, entries, divisors(8.0) if "both" in message else None))


# Files that are damaged, incomplete or not supported: each is refused by name, in one line, before any work


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


@settings(max_examples=50, deadline=None)
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


def test_a_split_file(target: Path, tmp_path: Path) -> None:
    first = make_gguf(target, tmp_path / "m.gguf", split=12)
    second, third = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (2, 3))
    assert_same_values(load_checkpoint(first), load_checkpoint(target))
    assert len(load_checkpoint(first).files) == 3 and BuildRequest(checkpoint=first).name == "m"
    parts = "is one of 3 parts, which must lie beside each other; "
    assert f"{parts}give the first, {first.name}" in refusal(second)
    data = second.read_bytes()
    second.unlink()
    assert f"{parts}fetch {second.name} too" in refusal(first)
    second.write_bytes(third.read_bytes())
    assert "is in an earlier part too" in refusal(first)
    second.write_bytes(data[: len(data) // 2])
    assert f"{second.name}: " in refusal(first) and "cut short" in refusal(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    assert f"{parts}give the first, renamed-00001-of-00003.gguf" in refusal(renamed)


def test_without_the_gguf_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    request = BuildRequest(checkpoint=file, drafter=tmp_path, output=tmp_path / "engine")
    advice = r"need the Python package gguf; .*pip install --editable '\.\[gguf\]'"
    for work in (compile_engine, dry_run):
        with pytest.raises(MissingDependency, match=advice):
            work(request)
