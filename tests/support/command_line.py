"""The command line in the test's own process: a process of its own takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddtree_trt.cli import app

Cli = Callable[..., tuple[int, str, str]]


def in_this_process(capture: pytest.CaptureFixture[str]) -> Cli:
    """A function that takes the arguments of a call and returns its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capture.readouterr()
        with pytest.raises(SystemExit) as caught:
            app([str(a) for a in arguments], prog_name="ddtree-trt")
        out, err = capture.readouterr()
        return int(caught.value.code or 0), out, err

    return call
