"""An engine on a pretended machine."""

from collections.abc import Iterator

import pytest
from fake_trt_engine import Machine

from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine


@pytest.fixture
def engine(machine: Machine) -> Iterator[TrtEngine]:
    """It gives everything back."""
    opened = open_engine(machine.directory)
    assert isinstance(opened, TrtEngine)
    yield opened
    opened.close()
    assert not machine.cuda.leaks
