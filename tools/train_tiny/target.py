"""Training of the target on the corpus; the weights with the least loss on the held-out part are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.families import QWEN3
from tools.train_drafter.drafter import plain_config, save
from tools.train_drafter.loop import Log, Run, train

from .settings import EOS, PAD, TargetSettings
from .tokenizer import TokenSet

Batch = tuple[Tensor, Tensor]


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
    )
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    return {"architectures": [QWEN3.architecture], **plain_config(dims, tied=True, dtype="float16", tokens=tokens)}


def fresh(settings: TargetSettings) -> Any:
    """Random weights; what each layer adds to the residual stream starts at zero."""
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**target_config(settings), "dtype": "float32", "torch_dtype": None}))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(p)
    return model


def save_target(model: Any, settings: TargetSettings, folder: Path) -> None:
    save(model, target_config(settings), folder)
    model.generation_config.save_pretrained(folder)


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

    log = Log(work / "train.log")
    return train(run, lambda m, _: answer_loss(m, next(stream)), measure, lambda m: save_target(m, settings, out), log)
