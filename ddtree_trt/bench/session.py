"""An engine for one request at a time, each from empty caches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ddtree_trt.bench.settings import Case
from ddtree_trt.runtime.core import assemble_core, open_core
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.options import DEFAULTS, DeviceRoundsMode, EngineOptions
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import Prompt


class Session:
    """Automatic budgets keep what they learn from one request to the next."""

    def __init__(self, directory: Path, options: EngineOptions = DEFAULTS, *, engine: Engine | None = None) -> None:
        """`engine`: an open engine, whose directory needs to hold a tokenizer only."""
        core = open_core(directory, options, warm=False) if engine is None else assemble_core(directory, engine)
        self.core = core
        self.engine = core.engine
        self.codec = core.codec
        self.manifest = core.engine.manifest

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, device_rounds: DeviceRoundsMode = "auto"
    ) -> tuple[RequestOutput, float]:
        """(output, time of its completion by `perf_counter`). Raises as LLM.generate does."""
        request = self.core.maker.make(prompt, params, device_rounds=device_rounds)
        self.core.scheduler.reset_prefix_cache()
        self.core.run([request])
        ended_s = time.perf_counter()
        request.raise_error()
        return request.output(), ended_s

    def run(self, prompt: Prompt, case: Case, **params: Any) -> tuple[RequestOutput, float]:
        """`generate` as the case says, on the device or the host, whatever `auto` would choose."""
        budget = "auto" if case.budget is None else case.budget
        given = SamplingParams(method=case.method, tree_budget=budget, **params)
        return self.generate(prompt, given, device_rounds="on" if case.device else "off")

    def close(self) -> None:
        self.core.close()
