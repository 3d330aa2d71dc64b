"""Rendering chat templates in a process of their own, with limits of time, memory and size.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from files and modules, but not from loops
that never end or texts that double, and neither a thread nor one operation on a long number or text can be stopped from
within the interpreter. A process can: the kernel refuses it memory, and it is killed when its time is up. There is one
for all engines of this process, started by the first rendering or by `start`; it ends when its input ends.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddtree_trt.errors import EngineError, UsageError, shown

_START_S = 120.0  # for the process to import what it needs, on a machine that has other things to do
_PIPE_BYTES = 1 << 16
# Isolated from the directory and the variables it is started in, but with this process's own packages.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
_MODULE = "ddtree_trt.runtime.chat_template_worker"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@dataclass(frozen=True)
class Limits:
    """What one rendering may take."""

    seconds: float = 5.0
    memory_bytes: int = 256 << 20  # beyond what the process has before it
    characters: int = 4 << 20  # of the text


class Renderer:
    """A process that renders chat templates, started when it is needed and again after it was stopped. Thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it, so that the first rendering finds it ready."""
        with self._lock:
            self._start()

    def wait(self) -> None:
        """Wait until the process is ready. Raises EngineError where it cannot be started."""
        with self._lock:
            self._ready_process()

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a chat, with the turn of the assistant begun.

        Raises UsageError where the template refuses the messages or takes more than the limits allow, EngineError where
        no process can be started.
        """
        try:
            chat = [dict(message) for message in messages]
            request = json.dumps({"template": template, "messages": chat, "variables": dict(variables)})
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"chat messages must hold what JSON can: {error}") from error
        with self._lock:
            answer = self._ask(request.encode() + b"\n")
        if "text" in answer:
            return str(answer["text"])
        raise UsageError(f"the chat template refused the messages: {shown(answer.get('error', ''))[1:-1]}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, request: bytes) -> dict[str, Any]:
        process = self._ready_process()
        end = time.monotonic() + self._limits.seconds
        try:
            _write(process, request, end)
            line = self._line(process, end, 12 * self._limits.characters + (1 << 16))
        except TimeoutError:
            self._stop()
            raise UsageError(
                f"the chat template took more than {self._limits.seconds:g} s for these messages and was stopped; "
                "shorten them, or give the prompt as text"
            ) from None
        except BrokenPipeError:
            line = b""
        except BaseException:  # Ctrl-C: the answer that is still to come is nobody's
            self._stop()
            raise
        return self._expect(line, "render")

    def _ready_process(self) -> subprocess.Popen[bytes]:
        process = self._start()
        if not self._ready:
            try:
                self._expect(self._line(process, time.monotonic() + _START_S, 1 << 16), "start")
            except TimeoutError:
                self._stop()
                raise EngineError(f"chat templates cannot be rendered: no process in {_START_S:g} s") from None
            self._ready = True
        return process

    def _expect(self, line: bytes, doing: str) -> dict[str, Any]:
        """The process's answer. Where it is the last one, or none has come, the next call starts another process."""
        answer: dict[str, Any] = json.loads(line) if line else {"last": True}
        if answer.get("last"):
            code = self._stop()
            if doing == "start":
                raise EngineError(f"chat templates cannot be rendered: {answer.get('error', f'exit code {code}')}")
            answer.setdefault("error", f"its process ended with code {code}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        limits = json.dumps([self._limits.seconds, self._limits.memory_bytes, self._limits.characters])
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-I", "-c", _BOOT.format(module=_MODULE), path, limits]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal is for this process
            )
        except OSError as error:
            raise EngineError(f"chat templates cannot be rendered: {sys.executable} does not start: {error}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _line(self, process: subprocess.Popen[bytes], end: float, most: int) -> bytes:
        """The process's next line, or nothing where it has ended. Raises TimeoutError."""
        assert process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            _wait(process.stdout.fileno(), select.POLLIN, end)
            chunk = os.read(process.stdout.fileno(), _PIPE_BYTES)
            line += chunk
            if not chunk or len(line) > most:
                return b""
        return bytes(line)

    def _stop(self) -> int | None:
        """Kill the process; returns its exit code."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return code

    def _forget(self) -> None:
        """In a forked process: the child is the parent's."""
        self._lock = threading.Lock()
        self._process, self._ready = None, False


def _write(process: subprocess.Popen[bytes], data: bytes, end: float) -> None:
    assert process.stdin is not None
    left = memoryview(data)
    while left:
        _wait(process.stdin.fileno(), select.POLLOUT, end)
        left = left[os.write(process.stdin.fileno(), left[:_PIPE_BYTES]) :]


def _wait(descriptor: int, event: int, end: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
        raise TimeoutError


_shared = Renderer()
start, wait, render = _shared.start, _shared.wait, _shared.render
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared._forget)
