"""Settings of `ddtree-trt ablate`."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_trt.artifact.limits import BUDGETS
from ddtree_trt.bench.settings import TINY
from ddtree_trt.errors import MAX_COUNT, UsageError, check_range
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import MAX_SEED


@dataclass(frozen=True)
class AblationSettings(EngineOptions):
    """Everything that decides what is compared."""

    engine: str
    prompts: tuple[str, ...] = (TINY,)
    limit: int = 12  # prompts per set, evenly spaced
    max_tokens: int = 128
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # draft nodes of a tree
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)  # most tokens of a path; the drafter's length is always among them
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)
    timed_prompts: int = 3  # of those, decoded to measure times; 0 measures none
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budgets", "depths", "temperatures", "prompts"):
            if not getattr(self, name):
                raise UsageError(f"give at least one of {name}")
        for name in ("budgets", "depths", "temperatures"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        for name in ("budgets", "depths"):
            for value in getattr(self, name):
                check_range(name, value, int(BUDGETS.lowest), int(BUDGETS.highest))
        for value in self.temperatures:
            check_range("temperature", value, 0, 100)
        for name, low, high in (
            ("limit", 1, MAX_COUNT),
            ("max_tokens", 2, MAX_COUNT),
            ("timed_prompts", 0, MAX_COUNT),
            ("seed", 0, MAX_SEED),
        ):
            check_range(name, getattr(self, name), low, high)
