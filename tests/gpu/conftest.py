"""Engines of a real TensorRT on a real GPU: `make test-trt`. Skipped, with the reason, everywhere else."""

from pathlib import Path

import pytest

from ddtree_trt.build.backends.tensorrt.backend import Machine, examine
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError


@pytest.fixture(scope="session")
def machine() -> Machine:
    try:
        return examine("plugin")
    except DDTreeError as error:
        pytest.skip(f"skipped: {error}")


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def built(request: pytest.FixtureRequest, machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    compile_engine(
        BuildRequest(target="tiny", backend="tensorrt", precision=request.param, output=directory, attention="plugin")
    )
    return directory
