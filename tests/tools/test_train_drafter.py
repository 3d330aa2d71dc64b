"""The drafter's training: prompts, stored answers, blocks, the loop and what it exports."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import edit_json, make_target, make_tokenizer
from drafts import marginals
from engine_builds import build_engine
from numerics import Truth, assert_close

from ddtree_trt.runtime.engines.base import DraftRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_drafter import __main__ as command
from tools.train_drafter import shards, training
from tools.train_drafter.blocks import block_loss, choose_candidates, draft_states, make_blocks, random_anchors
from tools.train_drafter.drafter import drafter_config, fresh
from tools.train_drafter.generation import Record, answer_batch
from tools.train_drafter.prompts import HELD_OUT, TRAINING, held_out_prompts, is_usable, training_prompts
from tools.train_drafter.settings import DataSettings, DrafterSettings, Settings, ValidationSettings
from tools.train_drafter.shortlist import read_shortlist, write_shortlist
from tools.train_drafter.target import Target, load_target, mask_token_id, spread_taps
from tools.train_drafter.training import Tables, train
from tools.train_drafter.validation import drafts, rounds
from tools.train_tiny.model import Drafter, load_drafter

LAYERS, VOCABULARY, MASK = 6, 96, 95
TEMPLATE = "t2 {% for m in messages %}{{ m['content'] }} t3 {% endfor %}"
DRAFTER = DrafterSettings(
    block=4, layers=2, taps=2, steps=20, warmup=2, sequences=3, micro_batches=2, anchors=6, candidates=48,
    muon_rate=0.05, adam_rate=0.02, average=0.5,
)  # fmt: skip
SETTINGS = Settings(
    data=DataSettings(batch=8, pool=2, max_new=24, max_prompt=80, self_tokens=12),
    drafter=DRAFTER,
    validation=ValidationSettings(prompts=3, max_new=16, budget=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target with a chat template."""
    path = make_target(tmp_path_factory.mktemp("target"), num_layers=LAYERS, num_heads=4, num_kv_heads=2)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of the Llama architecture."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    make_tokenizer(path, VOCABULARY)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def work(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of one pool and a validation shard."""
    path, target = tmp_path_factory.mktemp("work"), load_target(str(llama), 2, "cpu")
    lines: list[dict[str, Any]] = []
    shards.write_shards(target, path / "data", range(1), SETTINGS.data, lambda **line: lines.append(line))
    assert [line["shard"] for line in lines] == ["shard-00000-0", "shard-00000-1"]
    shards.write_greedy(target, ["a b c", "d"], 16, path / "validation.safetensors", SETTINGS.data.kept)
    return path


def beginning(source: Path, settings: Settings = SETTINGS) -> tuple[Drafter, Tables]:
    target = load_target(str(source), settings.drafter.taps, "cpu")
    config = drafter_config(target.config.to_dict(), settings.drafter, target.taps, MASK)
    return fresh(config, target.model.state_dict(), 0), Tables(target.embedding.clone(), target.head.clone())


def share_data(work: Path, path: Path) -> Path:
    """A new folder for checkpoints beside the data of `work`."""
    path.mkdir(exist_ok=True)
    (path / "data").symlink_to(work / "data")
    (path / "validation.safetensors").symlink_to(work / "validation.safetensors")
    return path


# Prompts.


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert training_prompts(1, 2, 300) == training_prompts(1, 2, 300)
    assert held_out_prompts(3, 60) == held_out_prompts(3, 60)
    assert training_prompts(1, 2, 300) != training_prompts(1, 3, 300) != training_prompts(2, 3, 300)


def test_prompts_vary_and_have_no_open_places() -> None:
    prompts = [prompt for _, prompt in training_prompts(1, 0, 3000)]
    assert len(set(prompts)) > 2000
    assert {kind for kind, _ in training_prompts(1, 0, 3000)} == set(TRAINING)
    for prompt in prompts + [prompt for _, prompt in held_out_prompts(1, 200)]:
        code = "{word: len(word) for word in words}"
        assert "{" not in prompt.replace(code, "") and "\0" not in prompt, prompt


def test_held_out_kinds_are_never_trained_on() -> None:
    held_out = held_out_prompts(1, 400)
    assert not set(HELD_OUT) & set(TRAINING)
    assert {kind for kind, _ in held_out[:10]} == set(HELD_OUT)
    assert not {p for _, p in held_out} & {p for part in range(20) for _, p in training_prompts(1, part, 500)}
    assert not [p for _, p in held_out if is_usable(p)], "a prompt of its own of this kind would be trained on"


def test_what_the_target_writes_of_a_held_out_kind_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(str(folder), 2, "cpu")
    texts = iter(["Write me a Poem about the sea", "What is a good name for a cat?", "t"])
    monkeypatch.setattr(target.tokenizer, "decode", lambda ids, **_: next(texts))
    empty = torch.zeros(4, 1)
    ended = Record([2, 5, 7, 1], 2, 1.0, empty, empty.int(), empty)
    cut = replace(ended, ids=[2, 5, 7, 8])
    monkeypatch.setattr(shards, "answer_batch", lambda *_: [ended, ended, cut, ended])
    found = shards.self_written(target, 4, SETTINGS.data, torch.Generator())
    assert found == ["What is a good name for a cat?"]


# The target's answers.


def alone(target: Target, prompt: list[int], length: int) -> tuple[list[int], torch.Tensor]:
    """Greedy answer and tapped states of the conversation without a batch, a cache or padding."""
    ids = list(prompt)
    for _ in range(length):
        hidden = target.model(torch.tensor([ids]), output_hidden_states=True)
        ids.append(int(hidden.logits[0, -1].argmax()))
        if ids[-1] in target.stops:
            break
    states = target.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    return ids, torch.cat([states[layer + 1][0] for layer in target.taps], -1)


@pytest.mark.parametrize("source", ["folder", "llama"])
def test_a_batch_answers_as_the_target_alone(source: str, request: pytest.FixtureRequest) -> None:
    """Prompts of unlike length: what is padded, dropped and cut off changes nothing."""
    target = load_target(str(request.getfixturevalue(source)), (0, 2), "cpu")
    target.model.float()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 90, length).tolist() for length in (3, 9, 17, 4, 30, 12, 7, 21)]
    generator = torch.Generator().manual_seed(0)
    records = answer_batch(target, prompts, torch.zeros(8), 40, 6, 3, generator, whole=True)
    for prompt, record in zip(prompts, records, strict=True):
        ids, states = alone(target, prompt, 40)
        assert record.ids == ids and record.prompt == len(prompt)
        assert torch.allclose(record.taps[:-1].float(), states, rtol=0.01, atol=0.01)
        answer = slice(len(prompt) - 1, len(ids) - 1)
        assert record.top_ids[answer, 0].tolist() == ids[len(prompt) :]


def test_the_same_pool_is_written_again_alike(llama: Path, work: Path, tmp_path: Path) -> None:
    """Shards that are there are left alone; a missing one is made as it was."""
    first = work / "data" / "shard-00000-1.safetensors"
    other = tmp_path / "shard-00000-0.safetensors"
    other.symlink_to(work / "data" / other.name)
    target = load_target(str(llama), 2, "cpu")
    shards.write_shards(target, tmp_path, range(1), SETTINGS.data, lambda **_: None)
    assert (tmp_path / first.name).read_bytes() == first.read_bytes()


def test_taps_are_spread_as_in_published_drafters() -> None:
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(30, 4) == (1, 10, 18, 27)
    assert spread_taps(30, 1) == (15,)
    with pytest.raises(SystemExit, match="4 layers"):
        spread_taps(4, 2)


def test_a_mask_token_is_asked_for_where_no_id_is_free(folder: Path) -> None:
    target = load_target(str(folder), 2, "cpu")
    assert mask_token_id(target, "t95") == mask_token_id(target, "95") == 95
    for wanted in (None, "t96", "500"):
        with pytest.raises(SystemExit, match="mask-token"):
            mask_token_id(target, wanted)


# Blocks and loss.


def test_the_loss_over_candidates_is_the_loss_over_the_vocabulary(llama: Path, work: Path) -> None:
    """With every token a candidate exactly; with some, in expectation of the sum of exponentials."""
    model, tables = beginning(llama)
    shard = shards.Shard(work / "data" / "shard-00000-0.safetensors")
    records = [shard.record(index) for index in range(4)]
    anchor = random_anchors(records, 5, torch.Generator().manual_seed(1))
    assert all(r.prompt <= a < len(r.ids) - 1 for r, row in zip(records, anchor.tolist(), strict=True) for a in row)
    blocks = make_blocks(records, anchor, 4, MASK, torch.device("cpu"))
    with torch.no_grad():
        states = draft_states(model, tables.embedding.float(), blocks, 4)
    full = replace(DRAFTER, candidates=VOCABULARY)
    loss = block_loss(states, blocks, tables.head.float(), full, torch.Generator())
    expected = weight = 0.0
    for n, record in enumerate(records):
        for a, start in enumerate(anchor[n].tolist()):
            for k, place in enumerate(range(start + 1, min(start + 4, len(record.ids)))):
                log_p = torch.log_softmax(states[n, a, k] @ tables.head.float().T, -1)
                heat = record.temperature or 1.0
                shares = torch.softmax(record.top_logits[place - 1].float() / heat, -1)
                soft = -(shares * log_p[record.top_ids[place - 1].long()]).sum().item()
                hard = -log_p[record.ids[place]].item()
                part = DRAFTER.label_share if record.temperature == 0 else 0.0
                w = math.exp(-k / DRAFTER.position_decay)
                expected, weight = expected + w * (part * hard + (1 - part) * soft), weight + w
    assert float(loss) == pytest.approx(expected / weight, rel=1e-4)


def test_random_candidates_stand_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=generator)
    sums = []
    for _ in range(400):
        ids, corrections = choose_candidates(torch.tensor([3, 3, 8]), 1000, 100, generator)
        assert len(ids) == len(set(ids.tolist())) == 100 and {3, 8} <= set(ids.tolist())
        sums.append((logits[ids] + corrections).exp().sum().item())
    assert np.mean(sums) == pytest.approx(logits.exp().sum().item(), rel=0.03)
    assert len(choose_candidates(torch.arange(9), 1000, 4, generator)[0]) == 9


def test_rounds_of_a_stored_answer() -> None:
    """Drafts right for two places, then one, then none; the last round ends with the answer."""
    answer = [7, 1, 2, 3, 4, 5, 6]
    ranked = torch.tensor([[1, 2, 9], [9, 9, 9], [9, 9, 9], [4, 9, 9], [9, 9, 9], [6, 8, 8]])[:, :, None]
    values = torch.zeros(6, 3, 1)
    assert rounds(values, ranked, answer, 3, 1) == [3, 2, 1]
    assert rounds(values, ranked, answer[:2], 3, 1) == [1]


# The loop.


def test_loss_falls_and_a_stopped_run_goes_on_as_if_it_had_not(
    llama: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    whole, parts = share_data(work, tmp_path / "whole"), share_data(work, tmp_path / "parts")
    model, tables = beginning(llama)
    train(model, tables, SETTINGS, whole, MASK, workers=1)
    lines = [json.loads(line) for line in (whole / "train.log").read_text().splitlines()]
    losses = [line["now"] for line in lines if "now" in line]
    assert losses[-1] < losses[0] - 0.2
    assert {"chain", "ddtree-4", "first"} <= set(lines[-1]) and lines[-1]["step"] == 20

    keep = training.Keeper.after_step

    def interrupted(keeper: training.Keeper, loss: float, stop: bool) -> None:
        keep(keeper, loss, stop)
        if keeper.worker.steps == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(training.Keeper, "after_step", interrupted)
    for steps in (9, 20):  # the signal ends the run with the step after the one in which it comes
        model, _ = beginning(llama)
        train(model, tables, SETTINGS, parts, MASK, workers=1)
        state = torch.load(parts / "checkpoint.pt", weights_only=True)
        assert state["worker"]["steps"] == steps
    expected = torch.load(whole / "checkpoint.pt", weights_only=True)
    for name, value in expected["model"].items():
        assert torch.equal(value, state["model"][name]), name
    assert all(map(torch.equal, expected["average"], state["average"]))
    assert torch.equal(expected["worker"]["momentum"], state["worker"]["momentum"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_two_workers(llama: Path, work: Path, tmp_path: Path) -> None:
    path = share_data(work, tmp_path)
    model, tables = beginning(llama)
    train(model, tables, replace(SETTINGS, drafter=replace(DRAFTER, steps=3)), path, MASK, workers=2)
    assert torch.load(path / "checkpoint.pt", weights_only=True)["worker"]["steps"] == 3


def test_the_stages_from_the_command_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(SETTINGS.validation, final_prompts=3, final_max_new=12, final_budgets=(2, 8))
    monkeypatch.setattr(command, "DEFAULTS", replace(SETTINGS, validation=small))
    common = ["--target", str(llama), "--work", str(tmp_path), "--device", "cpu"]
    for stage in (
        ["prompts"],
        ["data", "--pools", "1"],
        ["train", "--mask-token", "t95", "--steps", "2"],
        ["shortlist", "--size", "40"],
        ["evaluate"],
    ):
        monkeypatch.setattr(sys, "argv", ["train_drafter", *stage, *common])
        command.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == ["chain", "ddtree-2", "ddtree-8", "first"]
    assert 1 <= found["chain"] <= 4 and found["ddtree-2"] <= found["ddtree-8"]
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == list(HELD_OUT)[:3]
    ids = read_shortlist(tmp_path / "best")
    assert ids is not None and len(ids) == 40 and (ids.diff() > 0).all()
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
    assert config["dflash_config"] == {"mask_token_id": 95, "target_layer_ids": [1, 3]}
    assert (config["block_size"], config["num_target_layers"], config["architectures"]) == (4, 6, ["DFlashDraftModel"])


@pytest.mark.parametrize("shortlist", [False, True])
def test_the_package_drafts_as_the_training_code(folder: Path, tmp_path: Path, shortlist: bool) -> None:
    """An exported drafter, built with its target: the same log-probabilities."""
    target = load_target(str(folder), 2, "cpu")
    shards.write_shards(target, tmp_path / "data", range(1), SETTINGS.data, lambda **_: None)
    shards.write_greedy(target, ["a b c"], 16, tmp_path / "validation.safetensors", SETTINGS.data.kept)
    model, tables = beginning(folder)
    train(model, tables, replace(SETTINGS, drafter=replace(DRAFTER, steps=3)), tmp_path, MASK, workers=1)
    if shortlist:
        write_shortlist(tmp_path / "best", torch.arange(1, VOCABULARY, 2))
    engine = build_engine(folder, tmp_path / "best", tmp_path / "engine")
    dims = engine.manifest.drafting.dims
    assert (dims.block_size, dims.mask_token_id, dims.tap_layers) == (4, MASK, target.taps)
    truth, drafter = Truth(folder, dims.tap_layers), load_drafter(tmp_path / "best")
    embedding, head = (m.weight.detach() for m in (truth.model.model.embed_tokens, truth.model.lm_head))
    tokens, bonus, top = [5, 9, 40, 3, 77, 21], 13, 20
    engine.prefill(0, np.array(tokens, np.int64), rows="none", taps=True)

    def refuse_to_draw(*_: object) -> Any:
        raise AssertionError("a block drafter draws nothing")

    (draft,) = engine.draft([DraftRequest(0, bonus, top, 1, refuse_to_draw)])
    ids = [*tokens, bonus, 0]
    nothing = torch.zeros(len(ids), 1)
    record = Record(ids, len(tokens), 0.0, torch.tensor(truth(ids)[1]), nothing.int(), nothing)
    listed = read_shortlist(tmp_path / "best")
    values, indices = drafts(drafter, record, embedding, head if listed is None else head[listed], top, listed)
    assert_close(marginals(draft).log_probs, values[0].numpy(), "log-probabilities")
    assert marginals(draft).token_ids[:, :3].tolist() == indices[0, :, :3].tolist()
