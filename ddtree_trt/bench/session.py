"""An engine for one request at a time, each from empty caches."""

from __future__ import annotations

import time
from pathlib import Path

from ddtree_trt.bench.settings import BenchSettings, CheckSettings
from ddtree_trt.runtime.core import assemble_core, open_core
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import DeviceRoundsMode, SamplingParams
from ddtree_trt.runtime.text.codec import Prompt


class Session:
    """Automatic budgets keep what they learn from one request to the next."""

    def __init__(
        self,
        directory: Path,
        *,
        threads: int = 0,
        exact: bool | None = None,
        tensor_parallel_size: int = 1,
        engine: Engine | None = None,
    ) -> None:
        """`threads`, `exact` and `tensor_parallel_size` are those of `open_engine`. `engine`: an open engine in
        their place, whose directory needs to hold a tokenizer only."""
        if engine is None:
            self.core = open_core(
                directory, threads=threads, warm=False, exact=exact, tensor_parallel_size=tensor_parallel_size
            )
        else:
            self.core = assemble_core(directory, engine)
        self.engine = self.core.engine
        self.codec = self.core.codec
        self.manifest = self.core.engine.manifest

    @classmethod
    def open(cls, settings: BenchSettings | CheckSettings) -> Session:
        """A session with the engine of these settings."""
        return cls(
            Path(settings.engine),
            threads=settings.threads,
            exact=settings.exact,
            tensor_parallel_size=settings.tensor_parallel_size,
        )

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

    def close(self) -> None:
        self.core.close()
