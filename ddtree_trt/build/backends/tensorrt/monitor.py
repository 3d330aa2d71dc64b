"""TensorRT's progress as ours."""

from __future__ import annotations

from typing import Any

from ddtree_trt.artifact.progress import Progress


def make_monitor(trt: Any, stage: str, progress: Progress) -> Any:
    """An `IProgressMonitor` that reports the steps of TensorRT's outermost phases. `raise_stopping_error()` raises what
    `progress` raised, or a Ctrl-C, which must not pass through TensorRT; the build has then ended early."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._steps: dict[str, int] = {}  # of each outermost phase
            self._stopped: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build."""
            try:
                if phase_name in self._steps:
                    progress(f"{stage}: {phase_name}", step + 1, self._steps[phase_name])
            except BaseException as error:
                self._stopped = error
            return self._stopped is None

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._steps and self._stopped is None:
                self.step_complete(phase_name, self._steps[phase_name] - 1)

        def raise_stopping_error(self) -> None:
            if self._stopped is not None:
                raise self._stopped

    return Monitor()
