"""Folders in the Hugging Face format: configuration and fp16 weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from .model import MAX_POSITIONS, ROPE_THETA, Config
from .settings import EOS, MASK, PAD, DrafterSettings, TargetSettings


def _common(shape: TargetSettings, layers: int) -> Config:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float16",
        "eos_token_id": EOS,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def target_config(shape: TargetSettings) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], **_common(shape, shape.layers)}


def drafter_config(shape: TargetSettings, drafter: DrafterSettings) -> Config:
    """The target's shape with fewer layers, and the keys that make it a DFlash drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        **_common(shape, drafter.layers),
        "block_size": drafter.block,
        "num_target_layers": shape.layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(drafter.target_layer_ids)},
    }


def save(model: nn.Module, config: Config, folder: Path, prefix: str = "", dtype: torch.dtype = torch.float16) -> None:
    """Write config.json and model.safetensors; `prefix` goes before every tensor name."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        prefix + name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_target(model: nn.Module, config: Config, folder: Path) -> None:
    save(model, config, folder, prefix="model.")
    generation = {"_from_model_config": True, "eos_token_id": EOS, "pad_token_id": PAD, "use_cache": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
