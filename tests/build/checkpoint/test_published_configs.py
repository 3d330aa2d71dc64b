"""Configurations of published targets that are no Qwen3: all of their fields are known, and they mean what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.build.checkpoint.config import read_config

# As the hub has them for Llama-3.1-8B-Instruct, SmolLM2-135M-Instruct, Mistral-7B-Instruct-v0.3 and Qwen2.5-7B-Instruct
# with the scaling that its model card recommends for long texts.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2: dict[str, Any] = {
    **{name: value for name, value in LLAMA_8B.items() if name != "attention_dropout"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "head_dim", "theta", "positions", "scaling"),
    [
        (LLAMA_8B, 128, 5e5, 131072, "llama3"),
        (SMOLLM2, 64, 1e5, 8192, None),
        (MISTRAL_7B, 128, 1e6, 32768, None),
        (QWEN25_7B, 128, 1e6, 131072, "yarn"),
    ],
    ids=["llama", "smollm2", "mistral", "qwen2"],
)
def test_published_targets(
    tmp_path: Path, config: dict[str, Any], head_dim: int, theta: float, positions: int, scaling: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_in = read_config(tmp_path)
    dims = read_in.dims
    assert (dims.head_dim, dims.rope_theta, dims.max_positions) == (head_dim, theta, positions)
    assert (dims.rope_scaling and dims.rope_scaling.rope_type) == scaling
    assert not dims.qk_norm and dims.qkv_bias == (config["model_type"] == "qwen2")
    assert read_in.tied == config["tie_word_embeddings"] and read_in.stop_token_ids
