"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ddtree_trt
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.commands.profile import measure_engine
from ddtree_trt.runtime.llm import LLM

if TYPE_CHECKING:
    from fake_trt_engine import Lowerings, Machine

PACKAGED = Path(ddtree_trt.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair as an engine directory, profiled; shared by the whole run, so leave it as it is."""
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    compile_engine(BuildRequest(target="tiny", output=directory))
    measure_engine(directory, lambda stage, done, total: None)
    return directory


@pytest.fixture(scope="module")
def quick_profile() -> Iterator[None]:
    """Latencies are measured once and roughly, for tests that do not depend on how long anything takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree_trt.runtime.profile.REPETITIONS", (1, 1))
        patch.setattr("ddtree_trt.runtime.profile.TREE_TOKENS", (1, 9, 65))
        yield


# The TensorRT engine on pretended machines; see fake_trt_engine.py.


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair for ONNX Runtime, with the limits of `lowerings`."""
    directory = tmp_path_factory.mktemp("small") / "tiny"
    compile_engine(BuildRequest(target="tiny", output=directory, max_seq_len=256, max_batch=3, max_tree_budget=40))
    return directory


@pytest.fixture(scope="session")
def lowerings(small_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Lowerings:
    from fake_trt_engine import LIMITS, Lowerings

    folder = tmp_path_factory.mktemp("lowered")
    return Lowerings(folder, PACKAGED / "target", PACKAGED / "drafter", small_engine, LIMITS, "fp32")


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
