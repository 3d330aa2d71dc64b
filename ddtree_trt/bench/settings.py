"""Settings of `bench` and `check`, whose defaults the command line reads from here. Loading this loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddtree_trt.errors import MAX_COUNT, MAX_THREADS, UsageError, check_range, check_ranks
from ddtree_trt.runtime.decoding.methods import AUTO, BASELINES, METHODS, resolve_method
from ddtree_trt.runtime.params import DEVICE_ROUNDS, MAX_SEED

Budget = int | Literal["auto"]

TINY = "tiny"  # the prompts that ship with the package
DEVICE_ROUNDS_MEASURED = (*DEVICE_ROUNDS, "both")


@dataclass(frozen=True)
class Case:
    """A method with its budget."""

    method: str
    budget: Budget | None = None  # None: the method has no budget
    device: bool = False  # in rounds that stay on the device

    @property
    def label(self) -> str:
        """`ar`, `ddtree@16`, `ddtree@16+device`, `ddtree@auto`."""
        return f"{self.method}{'' if self.budget is None else f'@{self.budget}'}{'+device' if self.device else ''}"


@dataclass(frozen=True)
class BenchSettings:
    """Everything that decides what is measured."""

    engine: str
    methods: tuple[str, ...] = ()  # besides the baselines; empty takes the method that `auto` is
    budgets: tuple[Budget, ...] = (
        "auto",
        4,
        8,
        16,
        32,
        64,
    )  # of methods that make trees; chains have their full length
    prompts: tuple[str, ...] = (TINY,)  # JSON Lines files, or `tiny`
    limit: int | None = None  # prompts per set; None is all
    max_tokens: int = 256
    temperature: float = 0.0
    repeats: int = 1
    seed: int = 0
    device_rounds: str = "auto"  # for fixed budgets; auto: on a GPU; both: measured on the host and on the device
    threads: int = 0
    exact: bool | None = None  # as for LLM
    tensor_parallel_size: int = 1  # likewise

    def __post_init__(self) -> None:
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise UsageError(f"method must be one of {', '.join(METHODS)}, not {unknown[0]!r}")
        if self.device_rounds not in DEVICE_ROUNDS_MEASURED:
            raise UsageError(f"device_rounds must be one of {', '.join(DEVICE_ROUNDS_MEASURED)}")
        if not (self.budgets and self.prompts):
            raise UsageError("give at least one of budgets and of prompts")
        if bad := [b for b in self.budgets if b != "auto" and b < 1]:
            raise UsageError(f"budget {bad[0]} draws no tree; use 1 or more, or auto (method ar is the budget 0)")
        for name, low, high in (("limit", 1, MAX_COUNT), ("max_tokens", 2, MAX_COUNT), ("repeats", 1, MAX_COUNT)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low, high)
        check_range("temperature", self.temperature, 0, 100)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("threads", self.threads, 0, MAX_THREADS)
        check_ranks(self.tensor_parallel_size)
        if self.tensor_parallel_size > 1 and self.device_rounds in ("on", "both"):
            raise UsageError("device_rounds is for whole targets, and tensor_parallel_size splits it; use auto or off")

    def cases(self, drafter_kind: str) -> list[Case]:
        """Each once: the baselines that the drafter can do, then the chosen methods. Trees have every budget.

        Raises UsageError for a method that needs another kind of drafter.
        """
        chosen = [resolve_method(name, drafter_kind) for name in self.methods or (AUTO,)]
        cases = []
        for method in dict.fromkeys([*(m for m in BASELINES if m.serves(drafter_kind)), *chosen]):
            for budget in self.budgets if method.branches else (None,):
                fixed = method.host_reason is None and budget not in (None, "auto")
                kinds = {"on": (True,), "both": (False, True)}.get(self.device_rounds, (False,)) if fixed else (False,)
                cases += [Case(method.name, budget, device) for device in kinds]
        return list(dict.fromkeys(cases))


@dataclass(frozen=True)
class CheckSettings:
    """Settings of `ddtree-trt check`."""

    engine: str
    prompts: tuple[str, ...] = (TINY,)
    limit: int = 12  # prompts per set, evenly spaced
    max_tokens: int = 128
    seeds: int = 24  # sampled requests per prompt, method and temperature; 0 skips the distribution test
    sampled_prompts: int = 4
    sampled_tokens: int = 12
    threads: int = 0
    exact: bool | None = None  # as for LLM
    tensor_parallel_size: int = 1  # likewise

    def __post_init__(self) -> None:
        for name in ("limit", "max_tokens", "sampled_prompts", "sampled_tokens"):
            check_range(name, getattr(self, name), 1, MAX_COUNT)
        check_range("seeds", self.seeds, 0, MAX_COUNT)
        check_range("threads", self.threads, 0, MAX_THREADS)
        check_ranks(self.tensor_parallel_size)
        if not self.prompts:
            raise UsageError("give at least one prompt set")
