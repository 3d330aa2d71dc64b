"""The command line without a process of its own."""

from __future__ import annotations

import pytest
from command_line import Cli, in_this_process


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """What a call writes counts, whoever writes it: libraries, too, which know nothing of sys.stderr."""
    return in_this_process(capfd)
