"""The drafter's beginning and its end: configuration, first weights, the folder that is published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train_tiny.export import save
from tools.train_tiny.model import Config, Drafter

from .settings import DrafterSettings


def drafter_config(target: Config, settings: DrafterSettings, taps: tuple[int, ...], mask: int) -> Config:
    """A DFlash drafter's config.json: the target's widths, a few layers, and what it reads of the target."""
    heads = target["num_attention_heads"]
    rope = target.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": settings.block,
        "bos_token_id": target.get("bos_token_id"),
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(taps)},
        "dtype": "bfloat16",
        "eos_token_id": target.get("eos_token_id"),
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": target["intermediate_size"],
        "layer_types": ["full_attention"] * settings.layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "max_window_layers": settings.layers,
        "num_attention_heads": heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": bool(target.get("tie_word_embeddings")),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target["vocab_size"],
    }


def fresh(config: Config, weights: dict[str, Tensor], seed: int) -> Drafter:
    """Start from the target's last layers where shapes agree; `fc` passes the deepest tapped state through."""
    torch.manual_seed(seed)
    model = Drafter(config)
    own = model.state_dict()
    first = config["num_target_layers"] - config["num_hidden_layers"]
    found = {}
    for name in own:
        parts = name.split(".")
        source = (
            f"model.layers.{first + int(parts[1])}.{'.'.join(parts[2:])}" if parts[0] == "layers" else f"model.{name}"
        )
        if source in weights and weights[source].shape == own[name].shape:
            found[name] = weights[source].float()
    entry = (
        f"model.layers.{first}.input_layernorm.weight"  # keys and values of the context are to begin as the target's
    )
    if entry in weights:
        found["hidden_norm.weight"] = weights[entry].float()
    model.load_state_dict(found, strict=False)
    hidden = config["hidden_size"]
    with torch.no_grad():
        torch.nn.init.normal_(model.fc.weight, std=0.02)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
    return model.requires_grad_(True)


def averaged(model: Drafter, average: Sequence[Tensor]) -> Drafter:
    """A frozen drafter like `model` whose parameters are `average`, rounded to bf16 as they are published."""
    shown = Drafter(model.cfg).to(model.fc.weight.device).requires_grad_(False)
    for p, value in zip(shown.parameters(), average, strict=True):
        p.copy_(value.bfloat16())
    return shown


def export(model: Drafter, folder: Path, facts: dict[str, Any]) -> None:
    """The drafter in bf16 as a Hugging Face folder, with the facts of its validation."""
    save(model, model.cfg, folder, dtype=torch.bfloat16)
    (folder / "validation.json").write_text(json.dumps(facts) + "\n")
