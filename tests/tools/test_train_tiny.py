"""The tiny pair from nothing: every stage in small, and what the package then makes of it."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from tools.train_drafter import loop
from tools.train_drafter.settings import DataSettings, Schedule, ValidationSettings
from tools.train_tiny import __main__ as command
from tools.train_tiny.settings import HYBRID, CorpusSettings, EvaluationSettings, Settings, TargetSettings

ASSETS = Path(__file__).resolve().parents[2] / "ddtree_trt" / "assets" / "tiny"


def small() -> Settings:
    s = Settings()

    def schedule(part: Any, steps: int) -> Schedule:
        return replace(part.schedule, seconds=0.0, steps=steps, warmup=2, micro_batches=2)

    drafters = {
        name: replace(d, schedule=replace(d.schedule, seconds=0.0, steps=2), anchors=4)
        for name, d in s.drafters.items()
    }
    return Settings(
        corpus=CorpusSettings(conversations=200, prompts_per_domain=1, held_out_per_domain=2),
        target=TargetSettings(tokens_per_micro=60, schedule=schedule(s.target, 6)),
        data=DataSettings(batch=4, pool=2, max_new=8, temperatures=((0.0, 0.75), (1.0, 0.25)), top_k=2048),
        pools=1,
        drafters=drafters,
        validation=ValidationSettings(prompts=3, max_new=8),
        evaluation=EvaluationSettings(budgets=(4,), max_new_tokens=4, temperatures=(0.0,)),
    )


def test_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    work, out = tmp_path / "work", tmp_path / "out"
    monkeypatch.setattr(command, "Settings", small)
    step = loop.Run.step

    def interrupted(run: loop.Run, loss_of: loop.Loss) -> float:
        if run.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, loss_of)

    def call(stage: str, *options: str) -> None:
        folders = ["--work", str(work), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["train_tiny", stage, *folders, *options])
        command.main()

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", interrupted)
        call("target")
    assert not (out / "target").exists()
    call("all")
    lines = [json.loads(line) for line in (work / "target" / "train.log").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert steps == [1, 3, 4, 6] and losses[-1] < losses[0] - 0.2
    for name in ("target", "drafter", "dspark", "eagle3"):
        ours, packaged = (json.loads((at / name / "config.json").read_text()) for at in (out, ASSETS))
        assert ours == packaged
    found = json.loads((out / "evaluation.json").read_text())
    assert set(found) == {"drafter", "dspark", "eagle3"}
    for name, report in found.items():
        modes = {"ar", "eagle-4"} if name == "eagle3" else {"ar", "dflash", "ddtree-4"}
        assert report["0.0"]["prompts"] == 3 and set(report["0.0"]["tokens_per_round"]) == modes

    shutil.rmtree(out / "target")
    for folder in (out / "drafter", work / "target", work / "drafter", work / "data"):
        shutil.rmtree(folder)
    s = small()
    target = replace(s.target, delta=HYBRID.target.delta, imitated=0.5)
    monkeypatch.setattr(command, "HYBRID", replace(s, target=target, drafters={"drafter": s.drafters["drafter"]}))
    call("drafter", "--hybrid")
    ours, packaged = (json.loads((at / "drafter" / "config.json").read_text()) for at in (out, ASSETS))
    assert ours == packaged and load_checkpoint(out / "target").dims.delta == HYBRID.target.delta
