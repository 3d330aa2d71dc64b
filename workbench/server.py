"""A server started for a measurement."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddtree_trt.errors import DDTreeError

_END_S = 120


@contextmanager
def started_server(engine: str, *options: str) -> Iterator[str]:
    """The URL of a server of an engine on a free port of this machine, started with further options of `serve`; it
    ends with the block. What the server writes to stderr is shown. Raises DDTreeError where it does not start, or does
    not end with exit code 0."""
    command = [sys.executable, "-m", "ddtree_trt", "serve", engine, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            if not (ready := server.stdout.readline()):
                raise DDTreeError(f"ddtree-trt serve {engine} did not start; the line above says why")
            yield ready.split()[-1]  # the line ends with the address
            server.send_signal(signal.SIGTERM)
            if code := server.wait(_END_S):
                raise DDTreeError(f"the server ended with exit code {code}")
        finally:
            if server.poll() is None:
                server.kill()
