"""GGUF files of random checkpoints: the same configuration, tensors and engine as from safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import STOP_TOKEN, make_drafter, make_target, refusal, write_safetensors
from gguf_files import gguf_name, make_gguf, tensors_of
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.checkpoint.gguf import files
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint, load_config
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.models.families import LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from ddtree_trt.models.rotary import inverse_frequencies

ALL = {family.model_type: family for family in (QWEN3, LLAMA, QWEN2)}
# Rows of whole blocks of every type that NumPy code can quantise to; K types have blocks of 256.
SIZES: dict[str, Any] = {"intermediate_size": 64}
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 16, "num_layers": 1}


def pair(path: Path, kind: str = "F32", **options: Any) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint as safetensors, and the same as a GGUF file."""
    directory = make_target(path / "target", **{**SIZES, **options})
    return load_checkpoint(directory), load_checkpoint(make_gguf(directory, path / "model.gguf", kind))


@pytest.mark.parametrize("family", [*ALL.values(), QWEN3_5, QWEN3_5_MOE], ids=lambda family: family.model_type)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_is_its_checkpoint(family: Any, tied: bool, tmp_path: Path) -> None:
    plain, read = pair(tmp_path, family=family, tied=tied)
    assert load_config(tmp_path / "model.gguf") == load_config(tmp_path / "target")
    assert (read.dims, read.tie_word_embeddings, read.shapes) == (plain.dims, tied, plain.shapes)
    assert read.stop_token_ids == plain.stop_token_ids == (STOP_TOKEN,)
    assert read.name == "model.gguf" and read.quantization is None
    assert read.identify().sha256 == hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest()
    for name in plain.shapes:
        np.testing.assert_array_equal(read.tensor(name), plain.tensor(name), err_msg=name)


@pytest.mark.parametrize(("kind", "scales"), [("Q4_K", (0, 2)), ("Q6_K", (208,))])
def test_types_of_large_blocks(kind: str, scales: tuple[int, ...], tmp_path: Path) -> None:
    """Nothing at hand quantises to these, so their bytes are drawn; the file's own are compared with the package's."""
    directory = make_target(tmp_path / "target", **LARGE)
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    matrices = {name: values for name, values in tensors_of(directory).items() if values.ndim == 2}
    drawn = {}
    for name, values in matrices.items():
        blocks = rng.integers(0, 256, (len(values), values.shape[1] // block, size), np.uint8)
        for place in scales:  # float16, must be finite
            blocks[..., place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        drawn[name] = blocks.reshape(len(values), -1)
    read = load_checkpoint(make_gguf(directory, tmp_path / "model.gguf", raw={n: (d, kind) for n, d in drawn.items()}))
    for name in read.shapes:
        if gguf_name(name) in drawn:
            expected = gguf.dequantize(drawn[gguf_name(name)], number)
            np.testing.assert_array_equal(read.tensor(name), expected, err_msg=name)
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
    plain = load_checkpoint(directory)
    for name in plain.shapes:
        np.testing.assert_array_equal(read.tensor(name), plain.tensor(name), err_msg=name)


def test_a_split_file(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "target", tied=False)
    plain = load_checkpoint(directory)
    first = make_gguf(directory, tmp_path / "model.gguf", split=10)
    assert first.name == "model-00001-of-00004.gguf"
    read = load_checkpoint(first)
    assert read.shapes == plain.shapes and len(read.files) == 4
    for name in plain.shapes:
        np.testing.assert_array_equal(read.tensor(name), plain.tensor(name), err_msg=name)
    assert read.identify().sha256 == hashlib.sha256(b"".join(p.read_bytes() for p in read.files)).hexdigest()
    assert BuildRequest(checkpoint=first).name == "model"
    assert BuildRequest(checkpoint=tmp_path / "some.Q4_1.gguf").name == "some.Q4_1"


def build(target: Path, drafter: Path, engine: Path, **options: Any) -> Manifest:
    return compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=engine, **options))


def greedy(engine: Path) -> list[list[int]]:
    prompts = [[3, 7, 30], [11, 5, 90, 2], [40]]
    with LLM(engine) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, method="ddtree", tree_budget=6))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (QWEN3, "F32"),
        (LLAMA, "Q8_0"),
        (LLAMA, "Q4_1"),
        (QWEN2, "Q8_0"),
        (QWEN3_MOE, "Q8_0"),
        (QWEN3_NEXT, "F32"),
        (QWEN3_5, "F32"),
        (QWEN3_5_MOE, "F32"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_an_engine_of_the_same_weights(family: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal in its weights' bytes to that of a safetensors checkpoint of the dequantised values, converted a few rows
    at a time, and so in tokens."""
    monkeypatch.setattr(files, "_ROWS_BYTES", 100)
    directory = make_target(tmp_path / "target", family=family, tied=False, **SIZES)
    drafter = make_drafter(tmp_path / "drafter", family=QWEN3 if family.delta else family, **SIZES)
    file = make_gguf(directory, tmp_path / "model.gguf", kind)
    number = gguf.GGMLQuantizationType[kind]
    rounded = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        rounded[name] = gguf.dequantize(gguf.quantize(values, number), number) if values.ndim == 2 else values
    write_safetensors(directory / "model.safetensors", rounded, "fp32")
    plain = build(directory, drafter, tmp_path / "plain")
    read = build(file, drafter, tmp_path / "read")
    assert read.files["weights.bin"] == plain.files["weights.bin"]
    assert read.files["target.onnx"] == plain.files["target.onnx"]
    assert (read.target.name, read.name) == ("model.gguf", "mine")
    assert replace(read.target, name="") != replace(plain.target, name="")
    assert greedy(tmp_path / "read") == greedy(tmp_path / "plain")


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


@pytest.mark.parametrize("family", ALL.values(), ids=ALL)
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
        np.where(np.arange(HEAD_DIM // 2) == 9, 1.1, 1) * divisors(8.0),
        np.full(HEAD_DIM // 2, np.nan),
    ],
    ids=["positions", "few", "one-off", "nan"],
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
        ({"type": "yarn"}, "it has no llama.rope.scaling.factor"),
        ({"type": "yarn", "factor": 0.5}, "rope.scaling.factor' must be a number from 1 to"),
        ({"type": "linear", "factor": 4.0, "alpha": 2.0}, "rope.scaling.alpha' is 2.0, which is not implemented"),
        ({"type": "none", "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1 is"),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 0.5}, "beta_fast 0.5 is below beta_slow 1"),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.5}, "attn_factor' is 1.5, which is not implemented; only 1"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0}, "yarn_ext_factor' is 0.0, which is not implemented"),
    ],
)  # fmt: skip
def test_other_scalings_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(scaled(tmp_path, entries))
