"""An engine as a contender: single requests, each from a cold cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from ddtree_trt.bench.contender import Outcome, Request
from ddtree_trt.bench.pairs.forced import ForcedEngine
from ddtree_trt.bench.settings import BenchSettings, Case
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.core import EngineCore, assemble_core, open_core
from ddtree_trt.runtime.decoding.methods import resolve_method
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.options import DEFAULTS, DeviceRoundsMode, EngineOptions
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import Prompt


class Session:
    """An engine for one request at a time, each from empty caches. Automatic budgets keep what they learn."""

    def __init__(
        self,
        directory: Path,
        options: EngineOptions = DEFAULTS,
        *,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: an open engine, whose directory needs to hold a tokenizer only."""
        core = open_core(directory, options, warm=False) if engine is None else assemble_core(directory, engine)
        self.core = core
        self.engine = core.engine
        self.codec = core.codec
        self.manifest = core.engine.manifest

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        core: EngineCore | None = None,
        device_rounds: DeviceRoundsMode = "auto",
    ) -> tuple[RequestOutput, float]:
        """(output, time of its completion by `perf_counter`) of one prompt, from an empty cache on slot 0.

        `core` replaces the session's own, over the same engine. Raises as LLM.generate does.
        """
        core = core or self.core
        request = core.maker.make(prompt, params, device_rounds=device_rounds)
        core.scheduler.reset_prefix_cache()
        core.run([request])
        ended_s = time.perf_counter()
        request.raise_error()
        return request.output(), ended_s

    @property
    def unusable_tokens(self) -> frozenset[int]:
        """Tokens that forced choices must not use: those that end a request, and the drafter's mask."""
        mask = self.manifest.drafting.mask_token_id
        return frozenset(self.manifest.stop_token_ids) | (frozenset() if mask is None else {mask})

    def close(self) -> None:
        self.core.close()


class EngineContender:
    """The session's engine, for every method it can do."""

    def __init__(self, session: Session, settings: BenchSettings) -> None:
        self._session = session
        manifest = session.manifest
        self.cases = settings.cases(manifest.drafter_kind)
        for case in self.cases:
            resolve_method(case.method, manifest.drafter_kind)
        self._core = session.core
        if settings.forced_acceptance is not None:
            most = 1 + manifest.drafting.longest_draft
            if settings.forced_acceptance > most:
                raise UsageError(
                    f"forced_acceptance {settings.forced_acceptance} is more than the {most} tokens that a round of "
                    "this engine can commit; lower it"
                )
            forced = ForcedEngine(session.engine, settings.forced_acceptance, session.unusable_tokens)
            self._core = session.core.with_engine(forced)

    def describe(self) -> dict[str, str]:
        return {"threads": str(self._session.engine.threads)}

    def run(self, case: Case, prompt_ids: Sequence[int], request: Request) -> Outcome:
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=not request.stop_token_ids,
            method=case.method,
            tree_budget="auto" if case.budget is None else case.budget,
        )
        started_s = time.perf_counter()
        output, ended_s = self._session.generate(
            list(prompt_ids), params, core=self._core, device_rounds="on" if case.device else "off"
        )
        metrics = output.metrics
        assert metrics.first_token_s is not None, "a finished request has emitted a token"
        return Outcome(
            output_tokens=metrics.output_tokens,
            first_token_s=metrics.first_token_s - started_s,
            decode_s=ended_s - metrics.first_token_s,
            token_ids=tuple(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            acceptance_lengths=tuple(metrics.acceptance_lengths),
            mean_budget=metrics.mean_budget,
            automatic=dataclasses.asdict(metrics.automatic) if metrics.automatic.rounds else None,
            stage_s={} if metrics.on_device else dict(metrics.stage_s),  # one launch has no stages
        )

    def close(self) -> None:
        self._session.close()
