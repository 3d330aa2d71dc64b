"""A process that does one kind of work for this one, a request at a time, and is killed when its time is up.

Neither a thread nor a call into a library can be stopped from within the interpreter; a process can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ddtree_trt.errors import EngineError, shown

_START_S = 120.0  # for the process to finish its imports on a busy machine
_ERROR_BYTES = 4096  # read from the end of the stderr of a process that did not start
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
_PACKAGES = str(Path(__file__).resolve().parent.parent)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def isolated(code: str, *arguments: str) -> list[str]:
    """The command that runs `code` with `arguments` as `sys.argv[1:]`, in a process that uses this one's packages and
    nothing of its directory or variables. Raises EngineError where Python's own program is
    not known."""
    if not sys.executable:
        raise EngineError("sys.executable is not set, so no process of this Python can be started")
    # '' is the working directory. Isolation drops import hooks of the user's site, one of which may have found us.
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    return [sys.executable, "-I", "-c", _BOOT + code, json.dumps([*path, _PACKAGES]), *arguments]


class WorkerProcess:
    """A process started and restarted when it is needed, with a line of JSON for each request and each answer.

    Its first answer says that it is ready; one with "last" is its last. Thread-safe: requests wait for each other.
    """

    _process: subprocess.Popen[bytes] | None
    _errors: BinaryIO | None  # stderr of the process until it is ready
    _ready: bool

    def __init__(self, module: str, argument: str, cannot: str, greeting: bytes = b"") -> None:
        """The process runs `main` of `module` with `argument`, and reads the line `greeting` before it is ready.
        `cannot`: the beginning of errors about the process itself."""
        self._module = module
        self._argument = argument
        self._cannot = cannot
        self._greeting = greeting
        self._reset_after_fork()

    def start(self) -> None:
        """Start the process without waiting for it, so that the first request finds it ready."""
        with self._lock:
            self._start()

    def wait(self) -> None:
        """Wait until the process is ready. Raises EngineError where it cannot be started."""
        with self._lock:
            self._ready_process()

    def ask(self, request: bytes, seconds: float, most_bytes: int) -> dict[str, Any]:
        """The answer, a line of at most `most_bytes`, to a request, a line of JSON.

        Raises TimeoutError, after which the process is another, and EngineError where it cannot be started or ends.
        """
        with self._lock:
            return self._parse_answer(self._exchange(self._ready_process(), request, seconds, most_bytes))

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ready_process(self) -> subprocess.Popen[bytes]:
        process = self._start()
        if not self._ready:
            try:
                line = self._exchange(process, self._greeting, _START_S, 1 << 16)
            except TimeoutError:
                raise EngineError(f"{self._cannot}: no process in {_START_S:g} s") from None
            self._parse_answer(line)
            self._ready = True
        return process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, seconds: float, most_bytes: int) -> bytes:
        """The line that follows a request; empty where the process has ended or wrote more than `most_bytes`. Raises
        TimeoutError. A pending answer must not be read by the next call, so what ends this ends the process."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        killer = threading.Timer(seconds, end)
        killer.daemon = True
        killer.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            line = process.stdout.readline(most_bytes + 1)
            if late.is_set():
                raise TimeoutError
        except BaseException:  # too late, or Ctrl-C
            self._stop()
            raise
        finally:
            killer.cancel()
        return line if line.endswith(b"\n") else b""

    def _parse_answer(self, line: bytes) -> dict[str, Any]:
        """The process's answer. Where it is the last one, or missing, the next call starts another process."""
        answer: dict[str, Any] = json.loads(line) if line else {"last": True}
        if answer.get("last"):
            starting, stderr = not self._ready, ""
            if self._errors is not None:
                self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
                stderr = shown(self._errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2])[1:-1]
            code = self._stop()
            if starting:
                reason = answer.get("error") or f"exit code {code}{stderr and f': {stderr}'}"
                raise EngineError(f"{self._cannot}: {reason}")
            if "error" not in answer:
                raise EngineError(f"{self._cannot}: their process ended with code {code}; try again")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        try:
            command = isolated(f"from {self._module} import main; main()", self._argument)
            self._errors = os.fdopen(os.memfd_create("stderr"), "w+b")  # a pipe would fill up
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C in a terminal must reach this process only
            )
        except EngineError as error:
            raise EngineError(f"{self._cannot}: {error}") from error
        except OSError as error:
            self._stop()
            raise EngineError(f"{self._cannot}: {command[0]} does not start: {error}") from error
        return self._process

    def _stop(self) -> int | None:
        """Kill the process; returns its exit code."""
        process, errors = self._process, self._errors
        self._reset()
        if errors is not None:
            errors.close()
        if process is None:
            return None
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()
        return process.returncode

    def _reset(self) -> None:
        self._process = self._errors = None
        self._ready = False

    def _reset_after_fork(self) -> None:
        """Drop the process in a forked child: it belongs to the parent."""
        self._lock = threading.Lock()
        self._reset()
