"""Training of the target on the corpus; the weights with the least loss on the held-out part are kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ddtree_trt.build.sources import PackagedSource
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import QWEN3, QWEN3_5
from tools.train_drafter.drafter import plain_config, save
from tools.train_drafter.loop import Log, Run, fast_dtype, train

from .settings import EOS, PAD, TargetSettings
from .tokenizer import TokenSet

Batch = tuple[Tensor, Tensor]
PACKAGED = PackagedSource("tiny").directory


def target_config(settings: TargetSettings) -> dict[str, Any]:
    dims = TransformerDims(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        num_layers=settings.layers,
        num_heads=settings.heads,
        num_kv_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.inner,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=2048,
        delta=settings.delta,
        rotary_dim=settings.head_dim // 4 if settings.delta else None,
    )
    family = QWEN3_5 if settings.delta else QWEN3
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    config = plain_config(dims, tied=True, dtype="float16", tokens=tokens, family=family)
    return {"architectures": [family.architecture], **config}


def fresh(settings: TargetSettings) -> Any:
    """Random weights; what each layer adds to the residual stream starts at zero."""
    torch.manual_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**target_config(settings), "dtype": "float32", "torch_dtype": None})
    )
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(p)
    if settings.delta:
        packaged = load_file(PACKAGED / "target" / "model.safetensors")
        model.load_state_dict(_as_hybrid(packaged, model.state_dict()), strict=False)
    return model


def _as_hybrid(weights: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The packaged target's tensors that a hybrid has: norms around 0, a gate of one half behind attention, a product
    of twice the size in return."""
    found = {}
    for name, value in weights.items():
        if name not in own:
            continue
        value = value.float()
        if name.endswith("norm.weight"):
            value -= 1
        if name.endswith("q_proj.weight"):
            heads = value.unflatten(0, (-1, own[name.replace("q_proj", "q_norm")].shape[0]))
            value = torch.stack((heads, torch.zeros_like(heads)), 1).flatten(0, 2)
        if name.endswith("o_proj.weight"):
            value *= 2
        found[name] = value
    return found


def groups(tokens: TokenSet, budget: int, rng: np.random.Generator) -> list[Any]:
    """Conversations of like length, some `budget` tokens together, in random order."""
    order = np.argsort(tokens.lengths + rng.uniform(0, 8, len(tokens.lengths)), kind="stable")
    found, begin = [], 0
    while begin < len(order):
        count = max(1, budget // (int(tokens.lengths[order[begin]]) + 8))
        found.append(order[begin : begin + count])
        begin += count
    return [found[index] for index in rng.permutation(len(found))]


def batches(tokens: TokenSet, settings: TargetSettings, number: int) -> Iterator[Batch]:
    """Micro-batches from `number` on, without end: an epoch's order depends on the epoch alone."""
    epoch = 0
    while True:
        for group in groups(tokens, settings.tokens_per_micro, np.random.default_rng([settings.seed, epoch])):
            if number:
                number -= 1
            else:
                yield pack(tokens, group)
        epoch += 1


def pack(tokens: TokenSet, group: Any) -> Batch:
    """Ids [N, S] padded on the right, answer mask [N, S]."""
    width = int(tokens.lengths[group].max())
    ids, mask = np.full((len(group), width), PAD), np.zeros((len(group), width), bool)
    for row, index in enumerate(group):
        start, length = int(tokens.starts[index]), int(tokens.lengths[index])
        ids[row, :length] = tokens.ids[start : start + length]
        mask[row, :length] = tokens.is_answer[start : start + length]
    return torch.from_numpy(ids), torch.from_numpy(mask)


def answer_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross entropy of answer tokens; requests only condition."""
    ids, mask = batch
    chosen = mask[:, 1:]
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[chosen]).float(), ids[:, 1:][chosen])


def imitation_loss(model: Any, packaged: Any, batch: Batch) -> Tensor:
    """How far each layer is from adding what the packaged target's adds to its own states: relative squares."""
    ids, _ = batch
    with torch.no_grad():
        states = packaged.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    place = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    angles, told, total = model.model.rotary_emb(states[0], place), ids != PAD, torch.zeros(())
    for layer, before, wanted in zip(model.model.layers, states[:-1], states[1:], strict=True):
        found, size = layer(before, position_embeddings=angles, position_ids=place), wanted - before
        if wanted is states[-1]:
            found, size = model.model.norm(found), wanted
        total = total + (found - wanted)[told].float().square().mean() / size[told].float().square().mean()
    return total


def train_target(settings: TargetSettings, arrays: dict[str, Path], work: Path, out: Path) -> bool:
    """Train from nothing, or on from work/checkpoint.pt; whether the end was reached."""
    work.mkdir(parents=True, exist_ok=True)
    run = Run(fresh(settings), settings.schedule, work / "checkpoint.pt")
    tokens, held = (TokenSet.load(arrays[part]) for part in ("train", "hold"))
    stream = batches(tokens, settings, run.steps * settings.schedule.micro_batches)
    check = [pack(held, group) for group in groups(held, 4000, np.random.default_rng(0))]

    @torch.no_grad()
    def measure(shown: Any) -> tuple[float, dict[str, Any]]:
        loss = float(torch.stack([answer_loss(shown, batch) for batch in check]).mean())
        return -loss, {"held_out_loss": round(loss, 4)}

    packaged = None
    if settings.imitated:
        packaged = AutoModelForCausalLM.from_pretrained(PACKAGED / "target", dtype=fast_dtype("cpu"))
        packaged.requires_grad_(False)

    def loss_of(model: Any, _: int) -> Tensor:
        if run.progress < settings.imitated:
            return imitation_loss(model, packaged, next(stream))
        return answer_loss(model, next(stream))

    def keep(model: Any) -> None:
        save(model, target_config(settings), out)
        model.generation_config.save_pretrained(out)

    return train(run, loss_of, measure, keep, Log(work / "train.log"))
