"""The drafters' training: prompts, stored answers, blocks, the loop and what it exports."""

import copy
import itertools
import json
import math
import os
import pickle
import runpy
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflash_truth
import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_target
from drafts import marginals
from engine_builds import build_engine
from numerics import Truth, assert_close
from safetensors.torch import load_file

import ddtree_trt
from ddtree_trt import LLM
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.models.families import LLAMA
from ddtree_trt.runtime.engines.base import DraftRequest
from ddtree_trt.runtime.tree import Bilinear, Marginals
from tools.train_drafter import data, loop, stages
from tools.train_drafter import settings as recipe
from tools.train_drafter.blocks import block_loss, cut_blocks, random_anchors, read_texts
from tools.train_drafter.drafter import drafter_config, fresh, read_shortlist, save, write_shortlist
from tools.train_drafter.model import DFlash, Eagle3, load_drafter
from tools.train_drafter.prompts import HELD_OUT, TRAINING, held_out_prompts, is_usable, training_prompts
from tools.train_drafter.settings import DataSettings, DrafterSettings, Schedule, Settings, ValidationSettings
from tools.train_drafter.target import Answer, ServedTarget, Target, load_target
from tools.train_drafter.training import train_drafter
from tools.train_drafter.validation import drafts, rounds

LAYERS, VOCABULARY, MASK = 6, 96, 95
TEMPLATE = "t2 {% for m in messages %}{{ m['content'] }} {{ 't3' if m['role'] == 'user' else 't1' }} {% endfor %}"
SCHEDULE = Schedule(steps=20, warmup=2, micro_batches=2, muon_rate=0.05, adam_rate=0.02, average=0.5, check_s=0.0)
DRAFTER = DrafterSettings(block=4, layers=2, taps=2, sequences=3, anchors=6, markov_rank=3, schedule=SCHEDULE)
SETTINGS = Settings(
    data=DataSettings(batch=8, pool=2, max_new=24, max_prompt=80, self_tokens=12, most_turns=3),
    drafter=DRAFTER,
    validation=ValidationSettings(
        prompts=3, max_new=16, budget=4, final_prompts=3, final_max_new=12, final_budgets=(2, 8), long=20
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target with a chat template."""
    path = make_target(tmp_path_factory.mktemp("target"), num_layers=LAYERS, num_heads=4, num_kv_heads=2)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of the Llama architecture."""
    shape: dict[str, Any] = {"num_layers": LAYERS, "family": LLAMA, "tied": False}
    path = make_target(tmp_path_factory.mktemp("llama"), config={"eos_token_id": [*range(1, 9)]}, **shape)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def answers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one pool of the Llama target's answers, and those to measure by beside it."""
    path, target = tmp_path_factory.mktemp("work") / "data", load_target(str(llama), 2)
    lines: list[dict[str, Any]] = []
    prompts = data.chat_prompts(target, SETTINGS.data)
    data.write_pools(target, path, range(1), SETTINGS.data, prompts, lambda **line: lines.append(line))
    assert [line["pool"] for line in lines] == [0]
    rows = data.read(path / "pool-00000.safetensors")
    assert lines[0]["answers"] == sum(len(a.spans) for a in rows)
    assert lines[0]["answer_tokens"] == sum(end - begin for a in rows for begin, end in a.spans)
    asked = [data.chat_ids(target, texts) for texts in (("a b c", "e"), ("d",))]
    data.write_greedy(target, asked, replace(SETTINGS.data, max_new=16), path.parent / "validation.safetensors")
    return path


def make_drafter(target: Target, settings: DrafterSettings) -> Any:
    config = drafter_config(target.model.config.to_dict(), settings, target.taps, MASK)
    return fresh(config, target.model.state_dict(), LAYERS, 0)


def test_held_out_kinds_are_never_trained_on() -> None:
    held_out = held_out_prompts(1, 400)
    assert not set(HELD_OUT) & set(TRAINING)
    assert {kind for kind, _ in held_out[:10]} == set(HELD_OUT)
    assert not {p for _, p in held_out} & {p for part in range(20) for _, p in training_prompts(1, part, 500)}
    assert not [p for _, p in held_out if is_usable(p)], "a prompt of its own of this kind would be trained on"


def test_an_engine_answers_as_its_target(tiny_engine: Path) -> None:
    """Greedily to the token, stop tokens included; sampled otherwise, repeatably."""
    pair = Path(ddtree_trt.__file__).parent / "assets" / "tiny"
    tiny = load_target(str(pair / "target"), 2, tokenizer=pair / "tokenizer")
    tiny.model.float()
    prompts = [tiny.prompt_ids(text) for text in ("What is 2 + 3?", "Name a fruit.", "Sort 3, 1, 2.")]
    heat = torch.tensor([0.0, 0.0, 2.0])
    with LLM(tiny_engine) as llm:
        served, found = ServedTarget(**vars(tiny), llm=llm), list[list[Answer]]()
        for _ in range(2):
            torch.manual_seed(3)
            found.append(served.answers(prompts, heat, 40, 50, whole=False))
        greedy = served.answers(prompts, 0 * heat, 40, 50, whole=False)
    assert greedy == tiny.answers(prompts, 0 * heat, 40, 50, whole=True)
    assert any(a.ids[-1] in tiny.stops for a in greedy)
    assert found[0] == found[1] and found[0][:2] == greedy[:2] and found[0][2] != greedy[2]


@pytest.mark.parametrize("source", ["folder", "llama"])
def test_a_batch_answers_as_the_target_alone(source: str, request: pytest.FixtureRequest) -> None:
    """Prompts of unlike length: padding changes nothing; other rows are drawn at their temperature."""
    target = load_target(str(request.getfixturevalue(source)), (0, 2))
    target.model.float()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 90, length).tolist() for length in (3, 9, 17, 4, 30, 12, 7, 21)]
    torch.manual_seed(0)
    found = target.answers(prompts, torch.tensor([0.0] * 7 + [9.0]), 40, VOCABULARY, whole=True)
    greedy = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 40 and (len(ids) == len(prompt) or ids[-1] not in target.stops):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        greedy.append(Answer(ids, ((len(prompt), len(ids)),), 0.0))
    assert found[:7] == greedy[:7]
    assert found[7].ids != greedy[7].ids and found[7].temperature == 9.0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_loss_is_that_of_every_draft_by_itself(llama: Path, answers: Path, kind: str) -> None:
    """One draft at a time, from the definition; DSpark's head adds what it says of the token before."""
    target, settings = load_target(str(llama), 2), replace(DRAFTER, kind=kind)
    target.model.float()
    model, rows = (make_drafter(target, settings).requires_grad_(False), data.read(answers / "pool-00000.safetensors"))
    if model.markov_head is not None:
        model.markov_head.markov_w2.weight.normal_()
    rows = sorted(rows, key=lambda a: -len(a.spans))[:4]
    assert len(rows[0].spans) > 1
    anchor, end = random_anchors(rows, 5, torch.Generator().manual_seed(1))
    blocks = cut_blocks(read_texts(target, rows), anchor, 4, end)
    states, expected, weight = model.drafts(blocks, target.embedding), 0.0, 0.0
    for n, answer in enumerate(rows):
        logits = target.model(torch.tensor([answer.ids])).logits[0]
        for a, start in enumerate(anchor[n].tolist()):
            (stop,) = [stop for begin, stop in answer.spans if begin <= start < max(begin + 1, stop - 1)]
            for k, place in enumerate(range(start + 1, min(start + 4, stop))):
                drafted = target.head @ states[n, a, k]
                if model.markov_head is not None:
                    head = model.markov_head
                    drafted = drafted + head.markov_w2.weight @ head.markov_w1.weight[answer.ids[place - 1]]
                log_p = torch.log_softmax(drafted, -1)
                soft = -(torch.softmax(logits[place - 1] / (answer.temperature or 1.0), -1) * log_p).sum().item()
                part = settings.label_share if answer.temperature == 0 else 0.0
                w = math.exp(-k / settings.position_decay)
                expected += w * ((1 - part) * soft - part * log_p[answer.ids[place]].item())
                weight += w
    assert float(block_loss(model, blocks, target, settings)) == pytest.approx(expected / weight, rel=1e-4)


def test_every_unrolled_step_of_eagle3_is_the_layer_on_its_own_features(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder), 2)
    target.model.float()
    model = make_drafter(target, replace(DRAFTER, kind="eagle3", inner=20, layers=1)).requires_grad_(False)
    torch.manual_seed(3)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3) + (p.dim() == 1))
    rng = np.random.default_rng(1)
    texts = read_texts(target, [Answer(rng.integers(2, 90, 12).tolist(), ((2, 12),), 0.0) for _ in range(2)])
    blocks = cut_blocks(texts, torch.tensor([[3, 6], [1, 8]]), 4)
    found = model.drafts(blocks, target.embedding)
    save(model, model.cfg, tmp_path)
    dims: Any = load_checkpoint(tmp_path).dims
    weights = {name.replace("midlayer.", "layers.0."): value.numpy() for name, value in model.state_dict().items()}
    truth = dflash_truth.Eagle3(dims, weights, target.embedding.numpy(), target.head.numpy())
    for n, a in itertools.product(range(2), range(2)):
        anchor, tokens = int(blocks.anchor[n, a]), texts.tokens[n].tolist()
        states = texts.taps[n, :anchor] @ model.fc.weight.T
        for step in range(3):
            out = truth.rows(states, tokens[1 : anchor + step + 1])[1][-1:]
            torch.testing.assert_close(found[n, a, step], truth.norm(out[0], "norm"), rtol=1e-3, atol=1e-4)
            states = torch.cat([states, out])


def test_rounds_of_a_stored_answer() -> None:
    """Drafts right for two places, then one, then none; the last round ends with the answer."""
    answer = [7, 1, 2, 3, 4, 5, 6]
    ranked = torch.tensor([[1, 2, 9], [9, 9, 9], [9, 9, 9], [4, 9, 9], [9, 9, 9], [6, 8, 8]])[:, :, None]
    found = [Marginals(np.zeros((3, 1), np.float32), ids.int().numpy()) for ids in ranked]
    for budget in (None, 3):  # a tree of one candidate a place is the chain
        assert rounds(found, answer, budget, 3) == [3, 2, 1]
        assert rounds(found, answer[:2], budget, 3) == [1]


KINDS = {
    "dflash": DRAFTER,
    "dspark": replace(DRAFTER, kind="dspark", schedule=replace(SCHEDULE, adam_rate=0.005)),
    "a head": replace(DRAFTER, kind="dspark", frozen=True, schedule=replace(SCHEDULE, adam_rate=0.05)),
    "eagle3": replace(DRAFTER, kind="eagle3", layers=1, inner=20),
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls_and_a_stopped_run_goes_on_as_if_it_had_not(
    llama: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    torch.set_num_threads(1)
    before, target, settings, init = signal.getsignal(signal.SIGTERM), load_target(str(llama), 2), KINDS[kind], None
    if kind == "a head":
        init = tmp_path / "body"
        body = make_drafter(target, DRAFTER)
        save(body, body.cfg, init)
    assert train_drafter(target, settings, MASK, tmp_path / "whole", answers, init, 4)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "train.log").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - (0.1 if kind == "a head" else 0.2)
    assert {"chain", "first"} <= set(lines[-1]) and lines[-1]["step"] == 20
    assert ("ddtree-4" in lines[-1]) == (kind != "eagle3")

    step = loop.Run.step

    def interrupted(run: loop.Run, loss_of: loop.Loss) -> float:
        if run.steps == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, loss_of)

    monkeypatch.setattr(loop.Run, "step", interrupted)
    for steps in (9, 20):
        assert train_drafter(target, settings, MASK, tmp_path / "parts", answers, init, 4) == (steps == 20)
        state = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
        assert state["steps"] == steps
    expected = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    for name, value in expected["model"].items():
        assert torch.equal(value, state["model"][name]), name
    assert all(map(torch.equal, expected["average"], state["average"]))
    assert signal.getsignal(signal.SIGTERM) is before
    weights = load_file(tmp_path / "whole" / "best" / "model.safetensors")
    if init is not None:
        whole = load_file(init / "model.safetensors")
        assert weights.keys() - whole.keys() == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        assert all(torch.equal(weights[key], whole[key]) for key in whole)
    assert isinstance(load_drafter(tmp_path / "whole" / "best"), Eagle3 if kind == "eagle3" else DFlash)


class InThisProcess:
    """A process that does its work where it is started, with copies of what it is given."""

    def __init__(self, **given: Any) -> None:
        self.given = pickle.dumps(given)

    def start(self) -> None:
        given = pickle.loads(self.given)
        given["target"](*given["args"])

    def join(self) -> None:
        """It has ended."""

    terminate = join


def test_one_command_writes_answers_trains_and_publishes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = replace(DRAFTER, schedule=replace(SCHEDULE, steps=2))
    monkeypatch.setattr(recipe, "DEFAULTS", replace(SETTINGS, drafter=drafter))
    monkeypatch.setattr(stages, "get_context", lambda _: SimpleNamespace(Process=InThisProcess))
    common = ["--target", str(llama), "--out", str(tmp_path), "--device", "cpu", "--batch", "8", "--minutes", "0"]
    for stage in (["fit", "--pools", "1", "--mask-token", "t95", "--shortlist", "40"], ["evaluate"]):
        monkeypatch.setattr(sys, "argv", ["train_drafter", *stage, *common])
        runpy.run_module("tools.train_drafter", run_name="__main__", alter_sys=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"final"' in line]
    assert len(told) == 2 and told[0] == told[1], "the drafter that is published is the one that was measured"
    for found in told[0].values():
        assert list(found) == ["chain", "ddtree-2", "ddtree-8", "first"]
        assert 1 <= found["chain"] <= 4 and found["ddtree-2"] <= found["ddtree-8"]
    assert [len(a.spans) for a in data.read(tmp_path / "work" / "chats.safetensors")] == [3]
    card = (tmp_path / "README.md").read_text()
    assert "DFlashDraftModel" in card and "2 steps" in card and f"| final | {told[0]['final']['chain']:.3f} |" in card
    rows = [json.loads(line) for line in (tmp_path / "work" / "prompts.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == list(HELD_OUT)[:3]
    ids = read_shortlist(tmp_path)
    assert ids is not None and len(ids) == 40 and (ids.diff() > 0).all()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
    assert config["dflash_config"] == {"mask_token_id": 95, "target_layer_ids": [1, 3]}
    assert (config["block_size"], config["num_target_layers"], config["architectures"]) == (4, 6, ["DFlashDraftModel"])


@pytest.mark.parametrize(
    ("kind", "shortlist", "window"),
    [("dflash", False, 0), ("dflash", True, 0), ("dflash", False, 5), ("dspark", False, 0), ("dspark", True, 5)],
)
def test_it_drafts_as_the_training_code(folder: Path, tmp_path: Path, kind: str, shortlist: bool, window: int) -> None:
    """An exported drafter, built with its target: the same log-probabilities, and factors of pairs."""
    target = load_target(str(folder), 2)
    model = make_drafter(target, replace(DRAFTER, kind=kind, window=window))
    if model.markov_head is not None:
        torch.nn.init.normal_(model.markov_head.markov_w2.weight)
        tables, given = (target.embedding, target.head), copy.deepcopy(model.markov_head)
        model.markov_head.project(tables, given)
        model = loop.Run(model, SCHEDULE, tmp_path / "none").averaged()
    save(model, model.cfg, tmp_path / "best")
    if shortlist:
        write_shortlist(tmp_path / "best", torch.arange(1, VOCABULARY, 2))
    if model.markov_head is not None:  # the same where training goes on with it
        given.project(tables, load_drafter(tmp_path / "best").markov_head, read_shortlist(tmp_path / "best"))
        assert all(map(partial(torch.allclose, atol=0.02), given.tables, model.markov_head.tables))
    engine = build_engine(folder, tmp_path / "best", tmp_path / "engine")
    dims = engine.manifest.drafting.dims
    assert (dims.block_size, dims.mask_token_id, dims.tap_layers) == (4, MASK, target.taps)
    exact = replace(target, model=Truth(folder, target.taps).model)  # not rounded to bf16
    tokens, bonus, top = [5, 9, 40, 3, 77, 21], 13, 20
    engine.prefill(0, np.array(tokens, np.int64), rows="none", taps=True)

    (draft,) = engine.draft([DraftRequest(0, bonus, top, 1)])
    answer = Answer([*tokens, bonus, 0], ((len(tokens), len(tokens) + 2),), 0.0)
    ((found,),) = drafts(load_drafter(tmp_path / "best"), exact, answer, top, read_shortlist(tmp_path / "best"))
    assert isinstance(found, Bilinear if kind == "dspark" else Marginals)
    if isinstance(found, Bilinear):
        parts = vars(found).items()
        assert parts and all(np.allclose(getattr(draft.candidates, name), part, atol=1e-4) for name, part in parts)
        return
    assert_close(marginals(draft).log_probs, found.log_probs, "log-probabilities")
    assert marginals(draft).token_ids[:, :3].tolist() == found.token_ids[:, :3].tolist()
