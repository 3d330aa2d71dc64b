"""Fixtures every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Cli, in_this_process
from hypothesis import HealthCheck, settings
from sharing import build_once, free_bytes, worker_count

from ddtree_trt.build import compile as compiling
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.commands.build import measure
from ddtree_trt.device.survey import Survey
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.engines import profile
from ddtree_trt.runtime.llm import LLM

if TYPE_CHECKING:
    from fake_trt_engine import Lowerings, Machine

    from ddtree_trt.runtime.engines.base import Engine

# A shell has its background jobs ignore Ctrl-C, and their processes inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing about the property.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` stands for. The environments of tests that run alone have no pytest-xdist."""
    return worker_count(len(os.sched_getaffinity(0)), free_bytes())


def known_costs(engine: Engine, *_: object) -> profile.Profile:
    """In place of measured latencies: about those of the packaged pair on two idle cores."""
    verify = {1: 0.4e-3, 2: 0.7e-3, 3: 0.75e-3, 5: 0.85e-3, 9: 1.2e-3, 17: 1.8e-3, 33: 3.0e-3, 65: 5.0e-3}
    times = profile.PassTimes(1, 64, 0.7e-3, tuple(verify.items()))
    return profile.Profile(profile.fingerprint(engine.manifest, engine.threads), times)


@pytest.fixture(scope="session", autouse=True)
def no_measuring() -> Iterator[None]:
    """Automatic budgets follow from known costs that rounds do not correct, so that the same test makes the same trees
    on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "measure", known_costs)
        patch.setattr(Costs, "learn", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def idle() -> Iterator[None]:
    """Figures come without the warning of a busy machine, however busy this one is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_gpu() -> Iterator[None]:
    """Backend `auto` is the CPU's, so that the same test builds the same engine on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "survey_machine", lambda *, import_modules: Survey())
        yield


@pytest.fixture(scope="session")
def tiny_engine(no_measuring: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair as an engine directory, with known costs; the same for all tests of a process, so leave it as
    it is."""

    def build(directory: Path) -> None:
        compile_engine(BuildRequest(target="tiny", output=directory))
        measure(directory, lambda stage, done, total: None)

    return build_once(tmp_path_factory, "tiny", build)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process. What a call writes counts, whoever writes it: libraries, too, which know
    nothing of sys.stderr."""
    return in_this_process(capfd)


@pytest.fixture(scope="session")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    """The packaged pair, open for all tests of a process; patches of it are taken back."""
    with LLM(tiny_engine) as llm:
        yield llm


# The TensorRT engine on pretended machines; see fake_trt_engine.py.


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair for ONNX Runtime, with the limits of `lowerings`."""

    def build(directory: Path) -> None:
        compile_engine(BuildRequest(target="tiny", output=directory, max_seq_len=256, max_batch=3, max_tree_budget=40))

    return build_once(tmp_path_factory, "small", build)


@pytest.fixture(scope="session", params=["plugin", "native"])
def lowerings(
    small_engine: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Lowerings:
    """In every form of a TensorRT engine."""
    from fake_trt_engine import FORMS, Lowerings

    return Lowerings.packaged(tmp_path_factory.mktemp("lowered"), small_engine, FORMS[request.param])


@pytest.fixture
def machine(lowerings: Lowerings) -> Iterator[Machine]:
    """A machine of its own for the test, its engine not opened yet."""
    from fake_trt_engine import installed

    with installed(lowerings.machine()) as machine:
        yield machine


@pytest.fixture(scope="module")
def running(lowerings: Lowerings) -> Iterator[tuple[LLM, Machine]]:
    """One open engine, for tests that look at what it does and not at what it did before."""
    from fake_trt_engine import installed

    with installed(lowerings.machine()) as machine:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            yield llm, machine
