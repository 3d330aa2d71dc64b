"""A process that does one kind of work for this one, a request at a time, within limits of time and memory.

Neither a thread nor a call into a library can be stopped from within the interpreter. A process can: the kernel ends it
when a request has used what it may, and the next request starts another.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.errors import EngineError

Work = Callable[[Any], dict[str, Any]]  # a request → its answer, both of what JSON can hold

_PACKAGES = str(Path(__file__).resolve().parent.parent)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    cpu_seconds: float
    memory_bytes: int  # beyond the memory of the process before it
    stack_bytes: int | None = None

    def reached(self, code: int) -> str | None:
        """The limit that ended a process, by its exit code, as what a request does."""
        if code == -signal.SIGPROF:
            return f"takes more than {self.cpu_seconds:g} s of a processor"
        if code == -signal.SIGABRT:
            return f"needs more than the {self.memory_bytes >> 20} MiB allowed"
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return f"goes too deep, or is too large (signal {-code})"
        return None


class LimitReached(Exception):
    """A request came to a limit; the text says what it does."""


class WorkerProcess:
    """A process started and restarted when it is needed, with a line of JSON for each request and each answer; it exits
    when its input ends. Thread-safe: requests wait for each other."""

    _process: subprocess.Popen[bytes] | None
    _ready: bool

    def __init__(self, work: str, limits: Limits, cannot: str, argument: Any = None) -> None:
        """`work`: "module:function", which gets the `argument`, and returns the `Work` of all requests. `cannot`: the
        beginning of errors about the process itself."""
        self._work = work
        self._limits = limits
        self._cannot = cannot
        self._argument = argument
        self._reset_after_fork()

    def start(self) -> None:
        """Start the process without waiting for it, so that the first request finds it ready."""
        with self._lock:
            self._start()

    def wait(self) -> None:
        """Wait until the process is ready. Raises EngineError where it cannot be started."""
        with self._lock:
            self._make_ready()

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer to a request, JSON in one line. Raises LimitReached, and EngineError where the process cannot be
        started or ends for another reason."""
        with self._lock:
            return self._exchange(self._make_ready(), request)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _make_ready(self) -> subprocess.Popen[bytes]:
        process = self._start()
        if not self._ready:
            answer = self._exchange(process, json.dumps(self._argument).encode())
            if "error" in answer:
                self._stop()
                raise EngineError(f"{self._cannot}: {answer['error']}")
            self._ready = True
        return process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # at Ctrl-C too: the next call must not read this one's answer
            self._stop()
            raise
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        limit, code = self._ready, self._stop()
        if limit and (reached := self._limits.reached(code)):
            raise LimitReached(reached)
        raise EngineError(f"{self._cannot}: their process ended with code {code}; try again")

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # -P: nothing of the working directory is imported. Packages are this process's, whatever hook found ours.
        command = [sys.executable, "-P", "-m", __name__, self._work, json.dumps(asdict(self._limits))]
        path = os.pathsep.join([*filter(None, sys.path), _PACKAGES])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in a terminal must reach this process only
            )
        except OSError as error:
            raise EngineError(f"{self._cannot}: {command[0]} does not start: {error}") from error
        return self._process

    def _stop(self) -> int:
        """Kill the process; returns its exit code."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return 0
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()
        return process.returncode

    def _reset_after_fork(self) -> None:
        """Drop the process in a forked child: it belongs to the parent."""
        self._lock = threading.Lock()
        self._process, self._ready = None, False


# In the process.


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    limits = Limits(**json.loads(sys.argv[2]))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # only answers go to stdout

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    argument = json.loads(requests.readline())
    try:
        work: Work = getattr(importlib.import_module(module), name)(argument)
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    limit(resource.RLIMIT_CORE, 0)
    if limits.stack_bytes is not None:
        limit(resource.RLIMIT_STACK, limits.stack_bytes)
    send({})
    for line in requests:
        if sys.platform == "linux":  # macOS has the limit and does not hold a process to it
            mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limit(resource.RLIMIT_AS, mapped + limits.memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        try:
            send(work(json.loads(line)))
        except MemoryError:
            os.abort()
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, at most its hard limit, which is not changed."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
