"""The drafter's configuration, its first weights, and the folder that is published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.tapped import BODY
from ddtree_trt.models.decoder import decoder_layer, final_norm, shapes_of
from tools.train_tiny.export import plain_config, save
from tools.train_tiny.model import Config, Drafter

from .settings import DrafterSettings


def drafter_config(target: Config, settings: DrafterSettings, taps: tuple[int, ...], mask: int) -> Config:
    """A DFlash drafter's config.json: the target's widths, a few layers, and what it reads of the target."""
    heads = target["num_attention_heads"]
    rope = target.get("rope_parameters") or {}
    dims = dflash.DFlashDims(
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        num_layers=settings.layers,
        num_heads=heads,
        num_kv_heads=target.get("num_key_value_heads") or heads,
        head_dim=target.get("head_dim") or target["hidden_size"] // heads,
        intermediate_size=target["intermediate_size"],
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
        max_positions=target["max_position_embeddings"],
        block_size=settings.block,
        mask_token_id=mask,
        tap_layers=taps,
        num_target_layers=target["num_hidden_layers"],
    )
    tokens = {name: target.get(name) for name in ("bos_token_id", "eos_token_id")}
    tied = bool(target.get("tie_word_embeddings"))
    return {**plain_config(dims, tied=tied, dtype="bfloat16", tokens=tokens), **dflash.config_entries(dims)}


def fresh(config: Config, weights: dict[str, Tensor], seed: int) -> Drafter:
    """Start from the target's last layers where shapes agree; `fc` passes the deepest tapped state through."""
    torch.manual_seed(seed)
    model = Drafter(config)
    own = model.state_dict()
    dims, first = model.dims, config["num_target_layers"] - config["num_hidden_layers"]
    # Name in the drafter → name in the target; keys and values of the context are to begin as the target's.
    sources = dict(zip(final_norm(dims, BODY).sources, final_norm(dims).sources, strict=True))
    sources[dflash.CONTEXT_NORM] = decoder_layer(dims, first).input_norm.sources[0]
    for index in range(dims.num_layers):
        mine, theirs = decoder_layer(dims, index, BODY), decoder_layer(dims, first + index)
        sources |= zip(shapes_of(mine), shapes_of(theirs), strict=True)
    found = {
        name: weights[source].float()
        for name, source in sources.items()
        if source in weights and weights[source].shape == own[name].shape
    }
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
