"""An engine with everything that serves requests on it: codec, request maker, scheduler.

`LLM`, `AsyncLLM` and `bench` drive the same core. What differs between them is who calls it, and when.
"""

from __future__ import annotations

from pathlib import Path

from ddtree_trt.runtime.decoding.budget import AutoBudgets
from ddtree_trt.runtime.decoding.latency import load_or_measure
from ddtree_trt.runtime.decoding.routing import check_mode
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.load import closed_on_failure, open_engine
from ddtree_trt.runtime.params import DeviceRoundsMode, check_device_rounds
from ddtree_trt.runtime.request_maker import Request, RequestMaker
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.text.codec import TextCodec


class EngineCore:
    """Makes requests and runs them. One thread calls the scheduler; another may make requests by `maker`."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        budgets: AutoBudgets,
        *,
        device_rounds: DeviceRoundsMode = "auto",
        profile: bool = False,
    ) -> None:
        self.engine, self.codec, self._budgets = engine, codec, budgets
        self.maker = RequestMaker(engine, codec, budgets, device_rounds=device_rounds)
        self.scheduler = Scheduler(engine, profile=profile)

    def with_engine(self, engine: Engine) -> EngineCore:
        """A core with this one's codec and budgets, and with the defaults of everything else, over another engine."""
        return EngineCore(engine, self.codec, self._budgets)

    def add(self, request: Request) -> None:
        """Hand a request to the scheduler; what was cancelled before stays out."""
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)

    def cancel(self, request: Request) -> None:
        """End what is left of a request; its slots are free at once."""
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.cancel(sequence)

    def run(self, requests: list[Request]) -> None:
        """Step until all are finished. Where a step raises, what is left of them is cancelled."""
        try:
            for request in requests:
                self.add(request)
            while not all(request.finished for request in requests):
                self.scheduler.step()
        finally:
            for request in requests:
                self.cancel(request)


def open_core(
    directory: Path,
    *,
    threads: int = 0,
    warm: bool = True,
    exact: bool | None = None,
    device_rounds: DeviceRoundsMode = "auto",
    profile: bool = False,
) -> EngineCore:
    """Load the engine in `directory`, with what `open_engine` takes and raises, and make it ready for requests.

    Raises UsageError where `device_rounds` is no mode, or one that this engine does not have.
    """
    engine = open_engine(directory, threads=threads, warm=warm, exact=exact)
    with closed_on_failure(engine):
        return assemble_core(directory, engine, device_rounds=device_rounds, profile=profile)


def assemble_core(
    directory: Path, engine: Engine, *, device_rounds: DeviceRoundsMode = "auto", profile: bool = False
) -> EngineCore:
    """The core of an engine that is open; its directory holds the tokenizer and the latency profile.

    A machine without a profile is measured here, which takes some seconds: automatic budgets need the costs from the
    first round on, and the measured slot 0 must be nobody's.
    """
    check_mode(check_device_rounds(device_rounds), engine)  # before seconds are spent
    codec = TextCodec(directory, engine.manifest.chat_template_args)
    manifest, costs = engine.manifest, load_or_measure(directory, engine)
    most, chains = manifest.limits.max_tree_budget, not manifest.drafting.at_once
    depth = min(most, manifest.drafting.longest_draft)
    budgets = AutoBudgets(costs, depth if chains else most, depth, buckets=engine.buckets, chains=chains)
    return EngineCore(engine, codec, budgets, device_rounds=device_rounds, profile=profile)
