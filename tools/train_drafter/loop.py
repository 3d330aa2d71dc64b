"""The training loop, resumable at any step: Muon for the layers' matrices, AdamW for the rest.

Where bf16 is fast, passes run on a copy of the weights in it, refreshed every step: faster than autocast, most of whose
time goes into casts.
"""

import copy
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Schedule

Loss = Callable[[Any, int], Tensor]
"""Of the copy of the model and the micro-batch's number, which no other micro-batch of the run has."""
Measure = Callable[[Any], tuple[float, dict[str, Any]]]
"""A model's score, the higher the better, and figures for the log."""


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """What passes are fastest in: bf16, but on a processor without AVX-512, where it takes ten times as long."""
    fast = torch.device(device).type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


class Log:
    """A JSON line per event, in a file and on the terminal."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, **fields: Any) -> None:
        line = json.dumps(fields)
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


class Run:
    """A model in training, its optimizers, its averaged weights and its place in the schedule."""

    def __init__(self, model: nn.Module, schedule: Schedule, checkpoint: Path) -> None:
        self.model, self.schedule, self.checkpoint = model, schedule, checkpoint
        self.steps, self.elapsed_s, self.best = 0, 0.0, float("-inf")
        self.copy = copy.deepcopy(model)
        for p in self.copy.parameters():
            p.data = p.data.to(fast_dtype(p.device))  # not the buffers: angles of rotary embedding need float32
        self.average = [p.detach().clone() for p in model.parameters()]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.dim() == 2 and ("layer" in name or name == "fc.weight")]
        chosen = set(map(id, matrices))
        self.rest = [p for _, p in named if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(self.rest, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(matrices, lr=schedule.muon_rate, weight_decay=schedule.weight_decay)
            )
        if checkpoint.exists():
            self._load(torch.load(checkpoint, weights_only=True, map_location="cpu"))

    def _load(self, state: dict[str, Any]) -> None:
        self.steps, self.elapsed_s, self.best = state["steps"], state["elapsed_s"], state["best"]
        self.model.load_state_dict(state["model"])
        for mine, stored in zip(self.average, state["average"], strict=True):
            mine.copy_(stored)
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)

    def save(self) -> None:
        """Everything a later run needs, written whole or not at all."""
        state = {
            "steps": self.steps, "elapsed_s": self.elapsed_s, "best": self.best, "model": self.model.state_dict(),
            "average": self.average, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }  # fmt: skip
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    @property
    def progress(self) -> float:
        """By the clock a busy machine shortens the run in steps, never in shape; in steps, a run repeats."""
        s = self.schedule
        return min(1.0, self.elapsed_s / s.seconds if s.seconds else self.steps / s.steps)

    def step(self, loss_of: Loss) -> float:
        """One optimizer step; its mean loss."""
        s, began, total = self.schedule, time.monotonic(), 0.0
        parameters, fast = list[Tensor](self.model.parameters()), list[Tensor](self.copy.parameters())
        with torch.no_grad():
            torch._foreach_copy_(fast, parameters)
        for number in range(s.micro_batches):
            loss = loss_of(self.copy, self.steps * s.micro_batches + number) / s.micro_batches
            loss.backward()
            total += loss.item()
        for p, each in zip(parameters, fast, strict=True):
            p.grad = None if each.grad is None else each.grad.float()
            each.grad = None
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        part = min(1.0, (1 - self.progress) / s.decay, (self.steps + 1) / s.warmup)
        for optimizer, rate in zip(self.optimizers, (s.adam_rate, s.muon_rate), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate * part
            optimizer.step()
        self.steps += 1
        keep = min(s.average, self.steps / (9 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, parameters, 1 - keep)
        self.elapsed_s += time.monotonic() - began
        return total

    def averaged(self) -> Any:
        """A frozen copy of the model with the averaged weights."""
        shown = copy.deepcopy(self.model).requires_grad_(False).eval()
        for p, value in zip(shown.parameters(), self.average, strict=True):
            p.copy_(value)
        for module in list[Any](shown.modules()):
            if hasattr(module, "settle"):
                module.settle()
        return shown


def train(run: Run, loss_of: Loss, measure: Measure, export: Callable[[Any], None], log: Log) -> bool:
    """Train to the schedule's end, or to SIGTERM or SIGINT; whether the end was reached.

    The schedule is a function of the step or of the time trained, so a run may be stopped, continued and prolonged at
    will. The averaged weights with the best score are exported.
    """
    s, losses, now = run.schedule, list[float](), time.monotonic()
    due_line, due_check, due_save, interrupted = now, now + s.check_s, now + s.save_s, False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while run.progress < 1 and not interrupted:
            losses.append(run.step(loss_of))
            now, done = time.monotonic(), run.progress >= 1
            stop = done or interrupted
            if now >= due_line or stop:
                due_line = now + 60
                loss = round(sum(losses) / len(losses), 4)
                log.write(step=run.steps, elapsed_s=round(run.elapsed_s), loss=loss)
                losses.clear()
            if now >= due_check or done:
                due_check = now + s.check_s
                shown = run.averaged()
                score, figures = measure(shown)
                log.write(step=run.steps, elapsed_s=round(run.elapsed_s), **figures)
                if score > run.best:
                    run.best = score
                    export(shown)
            if now >= due_save or stop:
                due_save = now + s.save_s
                run.save()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return run.progress >= 1
