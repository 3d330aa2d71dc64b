"""TensorRT's progress as ours."""

from __future__ import annotations

import threading
from typing import Any

from ddtree_trt.artifact.progress import Progress

_STEPS = 1000  # reported per phase, whatever TensorRT counts in


def make_monitor(trt: Any, stage: str, progress: Progress) -> Any:
    """An `IProgressMonitor` that reports TensorRT's phases, which nest, as one stage of ours per outermost phase. It is
    called from several threads. `raise_stopping_error()` raises what `progress` raised, such as a Ctrl-C, which must
    not pass through TensorRT; the build has then ended early."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()
            self._phases: dict[str, tuple[str | None, int]] = {}  # name → the phase around it, steps
            self._done: dict[str, int] = {}  # name → steps finished
            self._shown: dict[str, int] = {}  # outermost phase → how far it was reported to be
            self._stopped: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases[phase_name] = (parent_phase, max(num_steps, 1))
                self._done[phase_name] = 0
                self._report(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build."""
            with self._lock:
                self._done[phase_name] = step + 1
                self._report(phase_name)
                return self._stopped is None

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._done[phase_name] = self._phases[phase_name][1]
                self._report(phase_name)

        def raise_stopping_error(self) -> None:
            if self._stopped is not None:
                raise self._stopped

        def _report(self, name: str) -> None:
            inside = 0.0  # how far the phase within the running step is
            while True:
                outer, steps = self._phases[name]
                inside = min((self._done[name] + inside) / steps, 1.0)
                if outer not in self._phases:
                    break
                name = outer
            # Several phases may follow each other within one step of the phase around them: none goes back.
            self._shown[name] = max(self._shown.get(name, 0), int(inside * _STEPS))
            try:
                progress(f"{stage}: {name}", self._shown[name], _STEPS)
            except BaseException as error:
                self._stopped = error

    return Monitor()
