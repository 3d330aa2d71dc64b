"""Folders in the Hugging Face format: configuration and fp16 weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.models.decoder import BODY, TransformerDims
from ddtree_trt.models.families import QWEN3

from .eagle import ARCHITECTURE as EAGLE3
from .model import MAX_POSITIONS, ROPE_THETA, Config
from .settings import EOS, MASK, PAD, DrafterSettings, Eagle3Settings, TargetSettings

DSPARK = "DSparkDraftModel"


def _dims(shape: TargetSettings, layers: int) -> TransformerDims:
    return TransformerDims(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_layers=layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.inner,
        rms_norm_eps=1e-6,
        rope_theta=ROPE_THETA,
        max_positions=MAX_POSITIONS,
    )


def plain_config(dims: TransformerDims, *, tied: bool, dtype: str, tokens: Config) -> Config:
    """What the config.json of a target and of a drafter have in common; `tokens` are its special ones."""
    entries = {
        **QWEN3.config_entries(dims),
        "attention_dropout": 0.0,
        "dtype": dtype,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * dims.num_layers,
        "max_window_layers": dims.num_layers,
        "rope_parameters": {"rope_theta": dims.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        **tokens,
    }
    return dict(sorted(entries.items()))


def _tiny_config(dims: TransformerDims) -> Config:
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    return plain_config(dims, tied=True, dtype="float16", tokens=tokens)


def target_config(shape: TargetSettings) -> Config:
    return {"architectures": [QWEN3.architecture], **_tiny_config(_dims(shape, shape.layers))}


def drafter_config(shape: TargetSettings, drafter: DrafterSettings) -> Config:
    """The target's shape with fewer layers, and the keys that make it a DFlash drafter."""
    dims = dflash.DFlashDims(
        **vars(_dims(shape, drafter.layers)),
        block_size=drafter.block,
        mask_token_id=MASK,
        tap_layers=drafter.target_layer_ids,
        num_target_layers=shape.layers,
    )
    config = {"architectures": [dflash.ARCHITECTURE], **_tiny_config(dims), **dflash.config_entries(dims)}
    if not drafter.markov_rank:
        return config
    config["architectures"] = [DSPARK]
    # The first position of SpecForge's DSpark predicts too, unless the file says that it does not; DFlash's does not.
    config[dflash.SECTION] |= {
        "markov_head_type": "vanilla",
        "markov_rank": drafter.markov_rank,
        "projector_type": "dspark",
        "sample_from_anchor": False,
    }
    return {**config, "tie_word_embeddings": False}


def eagle3_config(shape: TargetSettings, drafter: Eagle3Settings) -> Config:
    """An EAGLE-3 drafter's config.json, as SpecForge writes it; the outputs of the layers it names are tapped.

    Without `draft_vocab_size` the head is the target's, as SGLang reads it.
    """
    dims = replace(_dims(shape, drafter.layers), intermediate_size=drafter.inner, qk_norm=False)
    section = {"eagle_aux_hidden_state_layer_ids": list(drafter.target_layer_ids), "use_aux_hidden_state": True}
    return {
        **_tiny_config(dims),
        "architectures": [EAGLE3],
        **({"draft_vocab_size": shape.vocabulary} if drafter.own_head else {}),
        "eagle_config": section,
        "model_type": "llama",
        "tie_word_embeddings": False,
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
    save(model, config, folder, prefix=BODY)
    generation = {"_from_model_config": True, "eos_token_id": EOS, "pad_token_id": PAD, "use_cache": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
