"""Configurations people publish: those of the presets' models are read, those of other drafters refused by a field."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.build.checkpoint.config import ModelConfig, read_config
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import CheckpointError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def published(name: str) -> dict[str, Any]:
    """The config.json of a target as the hub has it."""
    config: dict[str, Any] = json.loads((FIXTURES / "targets" / f"{name}.json").read_text())
    return config


# Each has a configuration, and under `read` fields of the record, or under `refused` the message.
DRAFTERS = {
    path.stem: json.loads(path.read_text())
    for folder in ("drafters", "eagle")
    for path in sorted((FIXTURES / folder).glob("*.json"))
}
QWEN3_8B = published("qwen3-8b")
DFLASH: dict[str, Any] = DRAFTERS["zlab-qwen3-4b-dflash"]["config"]
# Fields that are absent from a record of the first published checkpoints, which have their defaults.
FEATURES = """windows causal anchor_first draft_vocab_size own_embedding own_head markov_rank selector convolution
logit_scale logit_cap""".split()


def read(path: Path, config: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return read_config(path)


def refusal(path: Path, config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path, config)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600
    return message


@pytest.mark.parametrize(
    ("name", "head_dim", "theta", "positions", "scaling"),
    [
        ("llama-3.1-8b", 128, 5e5, 131072, "llama3"),
        ("smollm2-135m", 64, 1e5, 8192, None),
        ("mistral-7b-v0.3", 128, 1e6, 32768, None),
        ("qwen2.5-7b-long", 128, 1e6, 131072, "yarn"),  # with the scaling that its model card recommends for long texts
        ("qwen3-8b", 128, 1e6, 40960, None),
    ],
)
def test_published_targets(
    tmp_path: Path, name: str, head_dim: int, theta: float, positions: int, scaling: str | None
) -> None:
    config = published(name)
    found = read(tmp_path, config)
    dims, kind = found.dims, config["model_type"]
    assert (dims.hidden_size, dims.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert (dims.head_dim, dims.rope_theta, dims.max_positions) == (head_dim, theta, positions)
    assert (dims.rope_scaling and dims.rope_scaling.rope_type) == scaling
    assert (dims.qk_norm, dims.qkv_bias) == (kind == "qwen3", kind == "qwen2")
    assert found.tied == config["tie_word_embeddings"] and found.stop_token_ids


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_published_drafter_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    config, expected = DRAFTERS[name]["config"], DRAFTERS[name].get("read")
    if expected is None:
        assert DRAFTERS[name]["refused"] in refusal(tmp_path, config)
        return
    dims: Any = read(tmp_path, config).dims
    found = json.dumps({field: getattr(dims, field) for field in expected}, default=dataclasses.asdict)
    assert json.loads(found) == expected
    assert not isinstance(dims, DFlashDims) or set(dims.features()) == expected.keys() & {*FEATURES}


@pytest.mark.parametrize(
    ("kind", "rank", "gated"), [("vanilla", 256, False), ("gated", 256, True), ("gated", 0, False)]
)
def test_the_kind_of_a_markov_head(tmp_path: Path, kind: str, rank: int, gated: bool) -> None:
    """Plain or gated, and a rank of 0 is no head."""
    config = DRAFTERS["deepspec-dspark-qwen3-4b"]["config"]
    dims: Any = read(tmp_path, {**config, "markov_head_type": kind, "markov_rank": rank}).dims
    assert (dims.markov_rank, dims.markov_gated) == (rank, gated)


@pytest.mark.parametrize(
    "name",
    """use_sliding_window tie_word_embeddings max_window_layers head_dim rms_norm_eps rope_theta
    max_position_embeddings layer_types eos_token_id""".split(),
)
def test_a_field_that_is_null_is_not_set(tmp_path: Path, name: str) -> None:
    left_out = {field: value for field, value in QWEN3_8B.items() if field != name}
    assert read(tmp_path, {**QWEN3_8B, name: None}) == read(tmp_path, left_out)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_mrope": False, "is_causal": True, "mlp_bias": False, "head_chunks": None},
        {"attn_implementation": "sdpa", "_attn_implementation": "eager", "_flash_attn_2_enabled": True},
        {"name_or_path": "Qwen/Qwen3-8B", "num_labels": 2, "model_max_length": 4096},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
        {"mlp_only_layers": [], "output_router_logits": False, "norm_topk_prob": False},
        {"sliding_window": 0, "use_sliding_window": False},
        {  # what the base class of transformers 4 had, saved whole
            "_name_or_path": "x", "return_dict": True, "output_hidden_states": False, "torchscript": False,
            "is_decoder": False, "pruned_heads": {}, "tie_encoder_decoder": False, "is_encoder_decoder": False,
            "add_cross_attention": False, "cross_attention_hidden_size": None, "max_length": 20, "temperature": 1.0,
            "top_k": 50, "bad_words_ids": None, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
            "chunk_size_feed_forward": 0, "tokenizer_class": None,
        },
    ],
)  # fmt: skip
def test_harmless_fields_change_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, {**QWEN3_8B, **changes}) == read(tmp_path, QWEN3_8B)


def test_harmless_fields_of_a_drafter_change_nothing(tmp_path: Path) -> None:
    section = {**DFLASH["dflash_config"], "causal": False, "causal_head": False, "sample_from_anchor": False}
    neutral = {"is_causal": False, "draft_vocab_size": 151936, "output_multiplier": 1.0, "dflash_config": section}
    assert read(tmp_path, {**DFLASH, **neutral, "final_logit_softcapping": None}).dims == read(tmp_path, DFLASH).dims


def test_a_flat_drafter_is_no_language_model(tmp_path: Path) -> None:
    """DeepSpec's: what DFlash has in a section of its own, beside the fields of Qwen3."""
    flat = {**DFLASH, "target_layer_ids": [1, 9], "mask_token_id": 151669, "markov_rank": 256}
    del flat["dflash_config"], flat["architectures"]
    assert "block_size is 16, which is not implemented" in refusal(tmp_path, flat)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not valid JSON"),
        ("config.json", '{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": NaN}', "is not valid JSON"),
        ("generation_config.json", " " * (5 << 20), "more than 4 MiB"),
        ("hf_quant_config.json", "[]", "is not a JSON object but []"),
    ],
)
def test_json_that_is_none(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert message in str(caught.value) and file in str(caught.value) and len(str(caught.value)) < 500


# What is refused, by the field. None in place of a value leaves the field out.
OTHER_TARGETS: list[tuple[dict[str, Any], str]] = [
    # another arithmetic
    ({"use_mrope": True}, "use_mrope is true, which is not implemented; only false is"),
    ({"mlp_only_layers": [3]}, "mlp_only_layers is [3], which is not implemented; only [] is"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor is 2.0, which is not implemented; only 1 is"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ({"num_experts": 8}, "num_experts is 8, which is not implemented; only 0 is"),
    ({"mlp_bias": True}, "mlp_bias is true, which is not implemented; only false is"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"is_causal": False}, "is_causal is false"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures is 'Qwen3ForSequenceClassification'"),
    ({"model_type": "mixtral"}, "model_type is 'mixtral', only dense Qwen3, Llama, "),
    ({"quantization_config": {"bits": 4}}, "quantization_config is set and not ModelOpt's"),
    (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "set it to null for texts of no more tokens than",
    ),
    ({"num_key_value_heads": None}, "has no num_key_value_heads"),
    ({"num_key_value_heads": 3}, "num_heads 32 is not a multiple of num_kv_heads 3"),
    ({"head_dim": 24}, "head_dim is 24, it must be a multiple of 16"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 36"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "which is it"),
    ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window must be an integer from 1 to"),
    ({"eos_token_id": 151936}, "eos_token_id must be an integer from 0 to 151935, found 151936"),
    ({"eos_token_id": [151645, "x" * 9999]}, "eos_token_id must be an integer from 0 to 151935, found 'xxx"),
    ({"vocab_size": 96, "eos_token_id": [*range(96), 0]}, "eos_token_id names the whole vocabulary of 96"),
]
OTHER_DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"attention_sink_bias": True}, "attention_sink_bias is true"),
    ({"architectures": ["DFlash2DraftModel"]}, "has no conv_group_size"),
    ({"architectures": ["DominoDraftModel"]}, "architectures is 'DominoDraftModel', which is not implemented"),
    ({"layer_types": ["chunked_attention"] * 5}, "'chunked_attention', which is not implemented"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention is"),
    ({"color\n\x1b[2J": 1}, "'color\\n\\x1b[2J' is 1, which is not implemented"),
    ({"num_target_layers": None}, "has no num_target_layers"),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, "has no mask_token_id"),
    ({"dflash_config": {"target_layer_ids": [], "mask_token_id": 1}}, "target_layer_ids has 0 entries"),
]
OTHER_SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"attention_sink_bias": True}, "dflash_config.attention_sink_bias is true"),
    ({"projector_type": "domino", "gru_hidden_dim": 1024}, "dflash_config.projector_type is 'domino'"),
    ({"conv_kernel_size": 2, "conv_group_size": 16}, "dflash_config.conv_group_size is 16"),
    ({"use_swa": True}, "sliding_window is missing"),
]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        *((QWEN3_8B, *case) for case in OTHER_TARGETS),
        *((DFLASH, *case) for case in OTHER_DRAFTERS),
        *((DFLASH, {"dflash_config": {**DFLASH["dflash_config"], **changes}}, m) for changes, m in OTHER_SECTIONS),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    wanted = {name: value for name, value in {**config, **changes}.items() if value is not None}
    assert message in refusal(tmp_path, wanted)


SIZES = """block_size hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    num_key_value_heads num_target_layers vocab_size""".split()
OTHERS = """architectures dflash_config eos_token_id head_dim layer_types max_window_layers model_type rms_norm_eps
    rope_parameters rope_theta tie_word_embeddings use_sliding_window""".split()
FIELDS = [(config, field) for config in (QWEN3_8B, DFLASH) for field in (*SIZES, *OTHERS) if field in config]


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=[field for _, field in FIELDS])
def test_values_of_another_kind_or_size_are_refused_by_name(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    values: tuple[Any, ...] = (0, 1 << 40, 32.5, True, "8") if field in SIZES else (-1, 1e300, {"x": {}})
    for wrong in values:
        assert field in refusal(tmp_path, {**config, field: wrong}), wrong
    if field in SIZES and field != "max_position_embeddings":
        assert f"has no {field}" in refusal(tmp_path, {name: v for name, v in config.items() if name != field})
