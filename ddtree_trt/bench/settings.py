"""Settings of `bench` and `check`, whose defaults the command line reads from here. Loading this loads no NumPy."""

from dataclasses import dataclass
from typing import Literal

from ddtree_trt.errors import MAX_COUNT, UsageError
from ddtree_trt.records import option
from ddtree_trt.runtime.decoding.methods import AUTO, BASELINES, METHODS, resolve_method
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import MAX_SEED

Budget = int | Literal["auto"]

TINY = "tiny"  # the prompts that ship with the package
_PROMPTS = f"JSON Lines, or {TINY}; repeatable. Default: the shipped prompts."


@dataclass(frozen=True)
class Case:
    method: str
    budget: Budget | None = None  # None: the method has no budget
    device: bool = False  # in rounds that stay on the device

    @property
    def label(self) -> str:
        """`ar`, `ddtree@16`, `ddtree@16+device`, `ddtree@auto`."""
        return f"{self.method}{'' if self.budget is None else f'@{self.budget}'}{'+device' if self.device else ''}"


@dataclass(frozen=True)
class BenchSettings(EngineOptions):
    engine: str = ""
    methods: tuple[str, ...] = ()  # besides the baselines; empty takes the method that `auto` is
    # Of methods that make trees; chains have their full length.
    budgets: tuple[Budget, ...] = ("auto", 4, 8, 16, 32, 64)
    prompts: tuple[str, ...] = option((TINY,), _PROMPTS, "FILE")
    limit: int | None = option(None, "Prompts per set, evenly spaced. Default: all.", within=(1, MAX_COUNT))
    max_tokens: int = option(256, "New tokens of a request.", within=(2, MAX_COUNT))
    temperature: float = option(0.0, "Of every request.", "T", within=(0, 100))
    repeats: int = option(1, "Of every prompt; the median counts.", within=(1, MAX_COUNT))
    seed: int = option(0, "Of the first request.", within=(0, MAX_SEED))

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise UsageError(f"method must be one of {', '.join(METHODS)}, not {unknown[0]!r}")
        if not (self.budgets and self.prompts):
            raise UsageError("give at least one of budgets and of prompts")
        if bad := [b for b in self.budgets if b != "auto" and b < 1]:
            raise UsageError(f"budget {bad[0]} draws no tree; use 1 or more, or auto (method ar is the budget 0)")

    def cases(self, drafter_kind: str) -> list[Case]:
        """Each once: the baselines that the drafter can do, then the chosen methods. Trees have every budget. Raises
        UsageError for a method that needs another kind of drafter."""
        chosen = [resolve_method(name, drafter_kind) for name in self.methods or (AUTO,)]
        cases = []
        for method in [*(m for m in BASELINES if m.serves(drafter_kind)), *chosen]:
            on_device = method.host_reason is None and self.device_rounds == "on"
            budgets = self.budgets if method.branches else (None,)
            cases += [Case(method.name, b, on_device) for b in budgets]
        return list(dict.fromkeys(cases))


@dataclass(frozen=True)
class CheckSettings(EngineOptions):
    engine: str = ""
    prompts: tuple[str, ...] = option((TINY,), _PROMPTS, "FILE")
    limit: int = option(12, "Prompts per set, evenly spaced.", within=(1, MAX_COUNT))
    max_tokens: int = option(128, "New tokens of a greedy request.", within=(1, MAX_COUNT))
    seeds: int = option(24, "Sampled requests per prompt, method and temperature; 0 skips them.", within=(0, MAX_COUNT))
    sampled_prompts: int = 4
    sampled_tokens: int = 12
