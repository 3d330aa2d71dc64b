"""Two single-threaded workers in place of one two-threaded one, with Muon for matrices and AdamW for the rest.

On a shared machine an OpenMP team waits for its slowest thread at every operator. Here each worker owns one thread and
takes micro-batches from a shared counter, so a slow worker simply takes fewer; they meet twice a step at a barrier.
Parameters lie in shared memory: every worker updates its share of the matrices, the first one everything else. Passes
run on a copy in bf16, refreshed every step: 1.3 to 1.7 times as fast as autocast, most of whose time goes into casts.
"""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and the shape of the schedule: warm-up, plateau, straight line to zero."""

    adam: float
    muon: float
    weight_decay: float
    warmup_steps: int
    plateau: float  # part of the run before the line begins
    seconds: float = 0.0  # length of the run, by the clock ...
    steps: int = 0  # ... or in steps, where seconds is 0

    def progress(self, step: int, elapsed_s: float) -> float:
        """By wall-clock time, a busy machine shortens the run in steps, never in shape; in steps, a run repeats."""
        return min(1.0, elapsed_s / self.seconds if self.seconds else step / self.steps)

    def multiplier(self, step: int, elapsed_s: float) -> float:
        part = self.progress(step, elapsed_s)
        decay = 1.0 if part < self.plateau else (1 - part) / (1 - self.plateau)
        return min(1.0, (step + 1) / self.warmup_steps) * decay


class Shared:
    """What the workers share: gradients [workers, parameters], momenta [parameters], losses, counter and barrier."""

    def __init__(self, workers: int, parameters: int, device: torch.device) -> None:
        context = mp.get_context("spawn")
        self.workers = workers
        self.gradients = torch.zeros(workers, parameters, device=device).share_memory_()
        self.momentum = torch.zeros(parameters, device=device).share_memory_()
        self.losses = torch.zeros(workers, 2, dtype=torch.float64).share_memory_()
        self.taken: Any = context.Value("i", 0)
        self.barrier: Barrier = context.Barrier(workers)
        self.multiplier: Any = context.Value("d", 0.0)
        self.stop: Any = context.Value("i", 0)
        self.interrupted: Any = context.RawValue("i", 0)  # without a lock: a signal handler sets it


def orthogonalised(gradient: Tensor) -> Tensor:
    """Muon's update of matrices [count, rows, columns]: five Newton-Schulz steps towards the nearest orthogonal one."""
    tall = gradient.shape[1] > gradient.shape[2]
    x = gradient.mT if tall else gradient
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return (x.mT if tall else x).float()


class Worker:
    """One process's part of training `model`, whose parameters are shared.

    `elapsed_s` is the time already trained; `state`, what `state()` of an earlier run returned, goes on from there.
    """

    def __init__(
        self, shared: Shared, rank: int, model: nn.Module, rates: Rates, elapsed_s: float = 0.0,
        state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.shared = shared
        self.rank = rank
        self.rates = rates
        self.steps = 0
        self.began = time.time() - elapsed_s
        self.copy = copy.deepcopy(model)
        for p in self.copy.parameters():
            p.data = p.data.bfloat16()  # not the buffers: angles of rotary embedding need float32
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.copied: list[Tensor] = [p for p in self.copy.parameters() if p.requires_grad]
        self.places: dict[int, slice] = {}
        offset = 0
        for p in self.parameters:
            self.places[id(p)] = slice(offset, offset + p.numel())
            offset += p.numel()
        matrices = [p for name, p in named if p.dim() == 2 and ("layer" in name or name == "fc.weight")]
        chosen = {id(p) for p in matrices}
        self.rest = [p for p in self.parameters if id(p) not in chosen]
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in matrices:
            by_shape.setdefault(tuple(p.shape), []).append(p)
        self.groups = {
            shape: ps[rank :: shared.workers] for shape, ps in by_shape.items() if ps[rank :: shared.workers]
        }
        self.adam = torch.optim.AdamW(self.rest, lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0)
        if state is not None:
            self.steps = state["steps"]
            self.adam.load_state_dict(state["adam"])
            if rank == 0:
                shared.momentum.copy_(state["momentum"])

    def state(self) -> dict[str, Any]:
        """The first worker's: all that a later run needs beside the parameters themselves."""
        return {"steps": self.steps, "adam": self.adam.state_dict(), "momentum": self.shared.momentum.cpu().clone()}

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.began

    @property
    def is_done(self) -> bool:
        """Whether the schedule has come to its end."""
        return self.rates.progress(self.steps, self.elapsed_s) >= 1

    def _gradient(self, p: nn.Parameter) -> Tensor:
        return self.shared.gradients[:, self.places[id(p)]].sum(0).view_as(p)

    @torch.no_grad()
    def _muon(self, rate: float, beta: float = 0.95) -> None:
        for shape, parameters in self.groups.items():
            gradients = [self._gradient(p) for p in parameters]
            momenta = [self.shared.momentum[self.places[id(p)]].view_as(p) for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            update = orthogonalised(torch.stack(gradients).lerp(torch.stack(momenta), beta))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, delta in zip(parameters, update, strict=True):
                p.mul_(1 - rate * self.rates.weight_decay).add_(delta, alpha=-scale)

    def _accumulate(self, micro_batches: int, loss_of: Callable[[Any, int], Tensor]) -> None:
        """Take micro-batches until none is left; write their gradient and loss into this worker's rows."""
        shared, total, count = self.shared, 0.0, 0
        with torch.no_grad():
            torch._foreach_copy_(self.copied, list[Tensor](self.parameters))
        for p in self.copied:
            p.grad = None
        while True:
            with shared.taken.get_lock():
                number = shared.taken.value
                shared.taken.value += 1
            if number >= micro_batches:
                break
            loss = loss_of(self.copy, self.steps * micro_batches + number)
            (loss / micro_batches).backward()
            total, count = total + loss.item(), count + 1
        row = shared.gradients[self.rank]
        for p, fast in zip(self.parameters, self.copied, strict=True):
            row[self.places[id(p)]] = 0.0 if fast.grad is None else fast.grad.view(-1)
        shared.losses[self.rank, 0], shared.losses[self.rank, 1] = total, count

    def step(self, micro_batches: int, loss_of: Callable[[Any, int], Tensor]) -> tuple[float, bool]:
        """One optimizer step: (mean loss, whether to stop).

        `loss_of` gets the model in bf16 and the micro-batch's number, which no other micro-batch of the run has.
        """
        shared = self.shared
        self._accumulate(micro_batches, loss_of)
        if self.rank == 0:
            shared.multiplier.value = self.rates.multiplier(self.steps, self.elapsed_s)
            done = self.rates.progress(self.steps + 1, self.elapsed_s) >= 1
            shared.stop.value = int(done or bool(shared.interrupted.value))
        shared.barrier.wait()
        multiplier, stop = shared.multiplier.value, bool(shared.stop.value)
        loss = (shared.losses[:, 0].sum() / shared.losses[:, 1].sum()).item()
        if self.rank == 0:
            shared.taken.value = 0
            for p in self.rest:
                p.grad = self._gradient(p)
            nn.utils.clip_grad_norm_(self.rest, 1.0)
            for group in self.adam.param_groups:
                group["lr"] = self.rates.adam * multiplier
            self.adam.step()
        self._muon(self.rates.muon * multiplier)
        shared.barrier.wait()
        self.steps += 1
        return loss, stop


def launch(entry: Callable[..., None], workers: int, model: nn.Module, *arguments: Any, ends: bool = False) -> None:
    """Run entry(rank, shared, model, *arguments) in `workers` processes on one shared model.

    With `ends`, SIGTERM and SIGINT end the run after the step in progress, as if it had been the last. One worker runs
    in this process.
    """
    model.share_memory()
    parameters = list(model.parameters())
    shared = Shared(workers, sum(p.numel() for p in parameters), parameters[0].device)

    def interrupt(*_: Any) -> None:
        shared.interrupted.value = 1

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)} if ends else {}
    try:
        if workers == 1:
            entry(0, shared, model, *arguments)
        else:
            spawn(_child, (entry, ends, shared, model, *arguments), nprocs=workers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child(rank: int, entry: Callable[..., None], ends: bool, *arguments: Any) -> None:
    if ends:  # the parent decides: a signal to the whole group must not tear a step apart
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    entry(rank, *arguments)
