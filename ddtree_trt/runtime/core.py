"""The engine core, which `LLM`, `AsyncLLM` and `bench` drive: an engine, its codec, request maker and scheduler."""

import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import UsageError
from ddtree_trt.records import with_fields
from ddtree_trt.runtime.chat.formats import ChatFormat
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets
from ddtree_trt.runtime.decoding.routing import engine_host_reason, refuse_on
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.passes import closed_on_failure
from ddtree_trt.runtime.engines.profile import load_or_measure, store
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.request_maker import Request, RequestMaker
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.text.codec import TextCodec


class EngineCore:
    """Makes requests and runs them. One thread calls the scheduler; another may make requests with `maker`."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        budgets: AutoBudgets,
        options: EngineOptions = DEFAULTS,
        *,
        directory: Path | None = None,
    ) -> None:
        """`directory`: that of the engine, which gets what rounds have shown of its costs; None for one without."""
        self.engine = engine
        self.codec = codec
        self.maker = RequestMaker(engine, codec, budgets, device_rounds=options.device_rounds)
        self.scheduler = Scheduler(engine, profile=options.exact_stage_times)
        # Also where nobody closes the core, when it or the process ends.
        self._save = weakref.finalize(self, _save_costs, directory, budgets.costs)

    def close(self) -> None:
        """Save what rounds have shown of costs, and close the engine."""
        self._save()
        self.engine.close()

    def add(self, request: Request) -> None:
        """Hand a request to the scheduler, except for sequences that were cancelled before."""
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)

    def cancel(self, request: Request) -> None:
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.cancel(sequence)

    def run(self, requests: list[Request], progress: Progress = no_progress) -> None:
        """Step until all requests are finished, which `progress` counts; where a step raises, cancel the others."""
        try:
            for request in requests:
                self.add(request)
            while not all(request.finished for request in requests):
                self.scheduler.step()
                if progress is not no_progress:
                    progress("requests", sum(request.finished for request in requests), len(requests))
        finally:
            for request in requests:
                self.cancel(request)


class Client:
    """What `LLM` and `AsyncLLM` have in common: a core, and the process that may use it."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.engine, self.codec = core.engine, core.codec
        self._pid = os.getpid()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.codec.tokenizer

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How this engine's chats write reasoning and calls of tools."""
        return ChatFormat(self.codec)

    @property
    def _forked(self) -> bool:
        """Whether this is another process than the one that loaded the engine."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Raises UsageError in a forked process."""
        if self._forked:
            raise UsageError(
                f"this {type(self).__name__} was loaded by process {self._pid} and cannot be used in process "
                f"{os.getpid()}, which was forked from it; load one here, or start processes with multiprocessing's "
                "spawn method"
            )


def _save_costs(directory: Path | None, costs: Costs) -> None:
    if directory is not None and costs.rounds:
        store(directory, costs.corrected, "what rounds have shown of costs is forgotten")


def open_core(
    directory: Path,
    options: EngineOptions | None = None,
    *,
    engine: Engine | None = None,
    warm: bool = True,
    progress: Progress = no_progress,
    **fields: Any,
) -> EngineCore:
    """Open the engine in `directory` and assemble its core. Of an `engine` that is open already the directory needs to
    hold the tokenizer only. Other arguments and errors are those of `open_engine`; also raises UsageError where the
    engine has no rounds on the device and `device_rounds` is on.

    Latencies are measured here, for some seconds, where the profile of this machine is missing: automatic budgets need
    the costs from the first round on, and slot 0, which is measured, must be free.
    """
    options = with_fields(EngineOptions, options, fields)
    engine = engine or open_engine(directory, options, warm=warm, progress=progress)
    manifest = engine.manifest
    with closed_on_failure(engine):
        refuse_on(options.device_rounds, engine_host_reason(manifest))  # before the measurement
        codec = TextCodec(directory, manifest.chat_template_args)
        latencies = load_or_measure(directory, engine, progress)
        max_nodes, kind = manifest.limits.max_tree_budget, manifest.drafting
        # Of a drafted block the depths are weighed that a larger tree would reach.
        depth = kind.longest_draft if kind.drafts == "block" else min(max_nodes, kind.longest_draft)
        nodes = depth if kind.drafts == "tokens" else max_nodes
        budgets = AutoBudgets(Costs(latencies, nodes, engine.buckets), nodes, depth, kind.drafts)
        return EngineCore(engine, codec, budgets, options, directory=directory)
