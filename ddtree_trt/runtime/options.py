"""Options that an engine is opened with: the one place of their defaults, bounds and words. Imports nothing slow."""

from dataclasses import dataclass
from typing import Literal

from ddtree_trt.artifact.backends import TORCH
from ddtree_trt.errors import UsageError
from ddtree_trt.records import check, option

DeviceRoundsMode = Literal["auto", "on", "off"]
Fp8 = Literal["off", "drafter", "on"]
MAX_RANKS = 64  # processes over which an engine is split
SPLIT = "tensor_parallel_size"  # the option that splits it, for messages


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to open an engine; who opens one inherits from it, or holds one. Raises UsageError for a value out of range.

    Attributes:
        threads: CPU threads of the engine, at most four times the usable cores; 0 chooses automatically.
        tensor_parallel_size: GPUs over which the target is split, each with a process; without a GPU, processes. Needs
            a script whose work is under `if __name__ == "__main__":`, because the other processes import it.
        device_rounds: whether rounds stay on the device. `auto`: on a GPU, for every request that they can serve; `on`:
            refuse other requests; `off`: never. `metrics` of an output have the choice and its reason.
        fp8: weights in FP8, e4m3 with a scale for each row, made when the engine is opened: those of a DFlash
            `drafter`, which changes no text, or with `on` the target's too, which changes it as int8 does. On a GPU
            from compute capability 8.9 on, in bf16 or fp16.
        exact_stage_times: exact times of the stages in `metrics.stage_s`, for which each waits for the GPU; without it,
            work that a stage leaves on the GPU is timed in the next one that waits.
    """

    threads: int = option(0, "CPU threads; 0 chooses.", within=(0, 1024))
    tensor_parallel_size: int = option(
        1,
        "torch engines: GPUs over which the target is split, each with a process.",
        within=(1, MAX_RANKS),
        only=(TORCH.name,),
    )
    device_rounds: DeviceRoundsMode = option(
        "auto", "Rounds that stay on the GPU: auto where they can, on refuses other requests.", "auto|on|off"
    )
    fp8: Fp8 = option("off", "torch: weights in FP8, of the drafter or of both.", "off|drafter|on", only=(TORCH.name,))
    exact_stage_times: bool = option(False, "Exact times of stages: each waits for the GPU, which takes longer.", "")

    def __post_init__(self) -> None:
        check(self)
        if self.ranks > 1 and self.device_rounds == "on":
            raise UsageError("device_rounds is on, but a split target has rounds on the host only; use auto or off")
        if self.ranks > 1 and self.fp8 != "off":
            raise UsageError(f"fp8 is {self.fp8!r}, but the weights of a split target are not quantised; use off")

    @property
    def ranks(self) -> int:
        """Processes over which the target is split."""
        return self.tensor_parallel_size


DEFAULTS = EngineOptions()
