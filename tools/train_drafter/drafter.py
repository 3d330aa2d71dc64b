"""The drafter's configuration, its first weights, the folder that is published, and the tokens that it drafts from."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.tapped import TO_TARGET
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import QWEN3, Family
from tools import config_entries

from .model import SHORTLIST, Config, DFlash, Drafter, Eagle3, make
from .settings import DrafterSettings
from .target import Answer

RIGHT = "markov_head.markov_w2.weight"


def plain_config(dims: TransformerDims, *, tied: bool, dtype: str, tokens: Config, family: Family = QWEN3) -> Config:
    """What the config.json of a target and of a drafter have in common; `tokens` are its special ones."""
    entries = {
        "layer_types": ["full_attention"] * dims.num_layers,
        **config_entries.of_family(family, dims),
        "attention_dropout": 0.0,
        "dtype": dtype,
        "initializer_range": 0.02,
        "max_window_layers": dims.num_layers,
        "rope_parameters": {"rope_theta": dims.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        **tokens,
    }
    return dict(sorted(entries.items()))


def drafter_config(target: Config, settings: DrafterSettings, taps: tuple[int, ...], mask: int) -> Config:
    """The drafter's config.json: the target's widths, a few layers, and what it reads of the target.

    DSpark's is as SpecForge writes it, except that position 0 names nothing, as in DFlash; EAGLE-3's too, its head the
    target's.
    """
    heads, eagle = target["num_attention_heads"], settings.kind == "eagle3"
    rope = target.get("rope_parameters") or {}
    dims = dflash.DFlashDims(
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        num_layers=settings.layers,
        num_heads=heads,
        num_kv_heads=target.get("num_key_value_heads") or heads,
        head_dim=target.get("head_dim") or target["hidden_size"] // heads,
        intermediate_size=settings.inner or target["intermediate_size"],
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
        max_positions=target["max_position_embeddings"],
        block_size=settings.block,
        mask_token_id=mask,
        tap_layers=taps,
        num_target_layers=target["num_hidden_layers"],
    )
    tokens: Config = {name: target[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in target}
    tied = bool(target.get("tie_word_embeddings")) and settings.kind == "dflash"
    config = plain_config(dims, tied=tied, dtype=settings.dtype, tokens=tokens)
    if eagle:
        section = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
        return {**config, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": section, "model_type": "llama"}
    config |= {"architectures": [dflash.ARCHITECTURE], **config_entries.of_dflash(dims)}
    if settings.window:
        config |= {"layer_types": ["sliding_attention"] * settings.layers, "sliding_window": settings.window}
        config |= {"max_window_layers": 0, "use_sliding_window": True}
        config[dflash.SECTION]["causal"] = False
    if settings.kind == "dspark":
        config["architectures"] = ["DSparkDraftModel"]
        config[dflash.SECTION] |= {
            "markov_head_type": "vanilla",
            "markov_rank": settings.markov_rank,
            "projector_type": "dspark",
            "sample_from_anchor": False,
        }
    return config


def fresh(config: Config, weights: dict[str, Tensor], layers: int, seed: int) -> Drafter:
    """Start from the last of the target's `layers`; `fc` passes the deepest tapped state through."""
    torch.manual_seed(seed)
    model, hidden = make(config), config["hidden_size"]
    with torch.no_grad():
        torch.nn.init.normal_(model.fc.weight, std=0.02)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
    own = model.state_dict()
    copied = _of_eagle(model, weights, layers - 1) if isinstance(model, Eagle3) else _of_dflash(model, weights, layers)
    fitting = {name: value.float() for name, value in copied.items() if value.shape == own[name].shape}
    model.load_state_dict(fitting, strict=False)
    return model.requires_grad_(True)


def _of_dflash(model: DFlash, weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    first, found = layers - len(model.layers), {}
    for name in model.state_dict():
        source = f"model.{name}"
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"model.layers.{first + int(index)}.{rest}"
        elif name == dflash.CONTEXT_NORM:  # keys and values of the context are to begin as the target's
            source = f"model.layers.{first}.input_layernorm.weight"
        if source in weights:
            found[name] = weights[source]
    return found


def _of_eagle(model: Eagle3, weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The target's layer reads the feature's half of the input. Queries and keys have no norm here: the target's norms,
    where it has them, are made part of its matrices, for inputs of random sign."""
    source, attention, hidden = f"model.layers.{layer}.", model.midlayer.self_attn, model.cfg["hidden_size"]
    found = {"norm.weight": weights["model.norm.weight"]}
    for mine, theirs in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm", "post_attention_layernorm")):
        found[f"midlayer.{mine}.weight"] = weights[f"{source}{theirs}.weight"]
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        found[f"midlayer.{name}.weight"] = weights[f"{source}{name}.weight"]
    for name in ("q", "k", "v"):
        weight = weights[f"{source}self_attn.{name}_proj.weight"].float().cpu().clone()
        norm = weights.get(f"{source}self_attn.{name}_norm.weight")
        if norm is not None:
            heads = weight.view(-1, attention.size, hidden)
            heads /= heads.norm(dim=(1, 2), keepdim=True) / math.sqrt(attention.size)
            heads *= norm.float().cpu()[:, None]
        key = f"midlayer.self_attn.{name}_proj.weight"
        found[key] = torch.cat([torch.randn(weight.shape) * 0.02, weight], -1)
    return found


def save(model: nn.Module, config: Config, folder: Path) -> None:
    """Write config.json and model.safetensors, in the configuration's precision; a tied head is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["dtype"])
    weights = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    _replace(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_card(folder: Path, target: str, answers: Sequence[Answer], log: Path, found: dict[str, Any]) -> None:
    """Write README.md: what the drafter in `folder` learnt from, and its tokens per round, `found` by set of texts."""
    config, last = json.loads((folder / "config.json").read_text()), json.loads(log.read_text().splitlines()[-1])
    told, heat = [ids for a in answers for ids in a.told], sorted({a.temperature for a in answers})
    columns = list(next(iter(found.values())))
    rows = [["answers", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(f"{values[column]:.3f}" for column in columns)] for name, values in found.items()]
    lines = [
        f"# A drafter for {target}\n",
        f"{config['architectures'][0]}, trained by ddtree-trt's tools/train_drafter: {last['step']} steps in "
        f"{last['elapsed_s'] / 60:.0f} minutes. It learnt from {len(told)} answers of the target in {len(answers)} "
        f"conversations, {sum(map(len, told))} tokens at temperatures {', '.join(f'{t:g}' for t in heat)}.\n",
        "Tokens per round at temperature 0, on prompts of kinds that it was not trained on, alone (`final`) and behind "
        "long chats (`chats`); `first`: how often the first draft is right.\n",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _replace(path: Path, weights: dict[str, Tensor]) -> None:
    partial = path.with_suffix(".partial")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, path)


def most_frequent(answers: Sequence[Answer], vocabulary: int, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens of the answers, rising; of equally frequent ones the lower ids, which byte-pair
    encodings learnt earlier. Those of `always` are among them. Raises SystemExit where the vocabulary has fewer."""
    if not 0 < size <= vocabulary:
        raise SystemExit(f"--size must be 1 to {vocabulary}, the target's vocabulary, not {size}")
    counts = torch.bincount(torch.tensor([t for a in answers for ids in a.told for t in ids]), minlength=vocabulary)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def read_shortlist(folder: Path) -> Tensor | None:
    """The token of each draft id [V'] of a drafter's folder; None where it drafts from the whole vocabulary."""
    offsets = load_file(folder / "model.safetensors").get(TO_TARGET)
    return None if offsets is None else offsets.long() + torch.arange(len(offsets))


def write_shortlist(folder: Path, ids: Tensor) -> None:
    """Have the drafter in `folder` draft from the tokens `ids` [V'], rising: `d2t` and the size in its config.json."""
    weights = load_file(folder / "model.safetensors")
    offsets = (ids - torch.arange(len(ids))).to(torch.int32)
    if RIGHT in weights:
        weights[RIGHT] = weights[RIGHT][ids]
    _replace(folder / "model.safetensors", {**weights, TO_TARGET: offsets})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), SHORTLIST: len(ids)}, indent=2) + "\n")
