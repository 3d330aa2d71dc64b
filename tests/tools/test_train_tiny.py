"""The tiny drafters: EAGLE-3's unrolled steps, the Markov head."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_tiny import eagle
from tools.train_tiny.export import drafter_config, eagle3_config, save, save_target, target_config
from tools.train_tiny.model import Target, load_drafter
from tools.train_tiny.settings import DrafterSettings, Eagle3Settings, TargetSettings
from tools.train_tiny.training import drafter
from tools.train_tiny.training.draft_data import GREEDY, SAMPLED, DraftSet, Sequence, stem_of, write_states

SHAPE = TargetSettings(vocabulary=40, hidden=16, inner=24, layers=5, heads=4, kv_heads=2, head_dim=8)
EAGLE3 = Eagle3Settings(inner=20, target_layer_ids=(0, 1, 3))


@pytest.fixture
def target() -> Target:
    torch.manual_seed(1)
    return Target(target_config(SHAPE)).requires_grad_(False)


def make_eagle3(target: Target) -> eagle.Eagle3:
    """A random drafter whose every weight matters."""
    model = eagle.fresh(target, eagle3_config(SHAPE, EAGLE3), 2).requires_grad_(False)
    torch.manual_seed(3)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3) + (p.dim() == 1))
    return model


def plain_step(model: eagle.Eagle3, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """EAGLE-3's layer [H] at the last of rows (feature, embedding), every row seeing all before it; one head a time."""
    w = {name: value for name, value in model.state_dict().items()}
    norm = lambda x, name: x / torch.sqrt((x * x).mean() + 1e-6) * w[f"{name}.weight"]  # noqa: E731

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position * 10000.0 ** (-torch.arange(half) / half)
        low, high = x[:half], x[half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])

    joined = [torch.cat([norm(e, "midlayer.input_layernorm"), norm(f, "midlayer.hidden_norm")]) for f, e in inputs]
    last, mixed = len(inputs) - 1, []
    for head in range(SHAPE.heads):
        rows = slice(SHAPE.head_dim * head, SHAPE.head_dim * (head + 1))
        group = head // (SHAPE.heads // SHAPE.kv_heads)
        keys = slice(SHAPE.head_dim * group, SHAPE.head_dim * (group + 1))
        q = turn(w["midlayer.self_attn.q_proj.weight"][rows] @ joined[last], last)
        scores = torch.stack(
            [q @ turn(w["midlayer.self_attn.k_proj.weight"][keys] @ x, i) for i, x in enumerate(joined)]
        )
        values = torch.stack([w["midlayer.self_attn.v_proj.weight"][keys] @ x for x in joined])
        mixed.append(torch.softmax(scores / math.sqrt(SHAPE.head_dim), 0) @ values)
    x = inputs[last][0] + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
    h = norm(x, "midlayer.post_attention_layernorm")
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ h, w["midlayer.mlp.up_proj.weight"] @ h
    return x + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)


def test_every_unrolled_step_is_the_layer_with_its_own_features_fed_back(target: Target) -> None:
    model, length, steps = make_eagle3(target), 9, 4
    taps, ids = torch.randn(2, length, 3 * SHAPE.hidden), torch.randint(0, SHAPE.vocabulary, (2, length))
    rows, before = torch.tensor([[2, 5], [0, 8]]), torch.randint(0, SHAPE.vocabulary, (2, 2, steps))
    features, past = model.context(target, taps, ids)
    before[:, :, 0] = ids.gather(1, rows)  # the first step's keys come from the context
    found = model.unroll(target, features, past, rows, before)
    for n, a in itertools.product(range(2), range(2)):
        row = int(rows[n, a])
        inputs = [(model.fc.weight @ taps[n, p], target.embed_tokens.weight[ids[n, p]]) for p in range(row + 1)]
        for step in range(steps):
            out = plain_step(model, inputs)
            torch.testing.assert_close(found[n, a, step], out, rtol=1e-4, atol=1e-5)
            if step + 1 < steps:
                inputs.append((out, target.embed_tokens.weight[before[n, a, step + 1]]))


def make_data(folder: Path, target: Target, taps: tuple[int, ...]) -> None:
    """Draft data: random text that repeats itself."""
    torch.manual_seed(7)
    sequences: list[Sequence] = []
    for number in range(40):
        ids = torch.randint(5, SHAPE.vocabulary, (6,)).tolist()
        sequences.append((ids * 4, 6, SAMPLED if number % 4 == 0 else GREEDY))
    write_states(target, sequences, taps, stem_of(folder, 0))


SMALL: dict[str, Any] = {
    "seconds": 0.0,
    "steps": 30,
    "anchors": 4,
    "warmup_steps": 2,
    "block": 4,
    "target_layer_ids": (0, 1, 3),
}
DFLASH = DrafterSettings(layers=2, **SMALL)
LEARNERS: dict[str, DrafterSettings] = {
    "dspark": replace(DFLASH, markov_rank=3, body_frozen=True, adam_rate=0.05),
    "eagle3": replace(EAGLE3, measured_block=6, muon_rate=0.02, **SMALL),
    "eagle3-own-head": replace(EAGLE3, own_head=True, muon_rate=0.02, **SMALL),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_training_learns_and_goes_on_after_a_signal(
    target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LEARNERS[name]
    make_data(tmp_path, target, settings.target_layer_ids)
    save_target(target, target_config(SHAPE), tmp_path / "target")
    save(drafter.fresh(target, SHAPE, DFLASH), drafter_config(SHAPE, DFLASH), tmp_path / "body")
    files = {"target": tmp_path / "target", "data": tmp_path, "out": tmp_path / name}
    files |= {"log": tmp_path / "log.jsonl", "partial": tmp_path / "state.pt"}
    calls, loss = itertools.count(1), drafter.block_loss

    def interrupted(*arguments: Any) -> Tensor:
        if next(calls) == 40:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    monkeypatch.setattr(drafter, "block_loss", interrupted)
    drafter.train(settings, SHAPE, 1, files, tmp_path / "body")
    assert not files["out"].exists() and files["partial"].exists()
    drafter.train(settings, SHAPE, 1, files, tmp_path / "body")
    lines = [json.loads(line) for line in files["log"].read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps[0] == 1 and steps[1] == 11  # stopped after the tenth, four micro-batches each
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert not files["partial"].exists()
    weights = load_file(files["out"] / "model.safetensors")
    if name == "dspark":
        body = load_file(tmp_path / "body" / "model.safetensors")
        assert weights.keys() - body.keys() == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        assert all(torch.equal(weights[key], body[key]) for key in body)
        assert load_drafter(files["out"]).markov_head is not None
    else:
        assert ("lm_head.weight" in weights) == name.endswith("own-head")
        found = eagle.load_eagle3(files["out"])
        assert found.taps == settings.target_layer_ids


def test_the_markov_head_adds_what_it_says_of_the_token_before(target: Target, tmp_path: Path) -> None:
    settings = LEARNERS["dspark"]
    make_data(tmp_path, target, settings.target_layer_ids)
    data = DraftSet.load(stem_of(tmp_path, 0))
    blocks = drafter.make_blocks(data, torch.arange(5).numpy(), settings, torch.Generator().manual_seed(0))
    model = drafter.fresh(target, SHAPE, settings).requires_grad_(False)
    assert model.markov_head is not None
    model.markov_head.markov_w2.weight.normal_()
    plain = drafter.fresh(target, SHAPE, DFLASH)
    plain.load_state_dict(model.state_dict(), strict=False)
    added = drafter.draft_logits(model, target, blocks) - drafter.draft_logits(plain, target, blocks)
    first, second = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    for n, a, k in itertools.product(range(5), range(4), range(3)):
        if blocks.valid[n, a, k]:
            before = int(blocks.tokens[n, blocks.anchor[n, a] + k])
            torch.testing.assert_close(added[n, a, k], second @ first[before], rtol=1e-4, atol=1e-4)
