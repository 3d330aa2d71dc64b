"""Rendering of chat templates in a separate process, with limits of time, memory and size.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from files and modules, but not from loops
that never end or texts that double, and neither a thread nor one operation on a long number or text can be stopped from
within the interpreter. A process can: the kernel refuses it memory, and it is killed when its time is up. There is one
for all engines of this process, started by the first rendering or by `start_for`; it exits when its input ends.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddtree_trt.artifact.tokenizer_files import has_chat_template
from ddtree_trt.errors import EngineError, UsageError, shown
from ddtree_trt.isolation import isolated

_START_S = 120.0  # for the process to finish its imports on a busy machine
_PIPE_BYTES = 1 << 16
_ERROR_BYTES = 4096  # read from the end of the stderr of a process that did not start
_MODULE = "ddtree_trt.runtime.text.chat_template_worker"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@dataclass(frozen=True)
class Limits:
    """Limits of one rendering."""

    seconds: float = 5.0
    memory_bytes: int = 256 << 20  # beyond the memory of the process before it
    characters: int = 4 << 20  # of the text


class Renderer:
    """A process that renders chat templates, started and restarted when it is needed. Thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None  # stderr of the process until it is ready
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it, so that the first rendering finds it ready."""
        with self._lock:
            self._start()

    def start_for(self, directory: Path) -> None:
        """`start` if the tokenizer in the directory has a chat template."""
        if has_chat_template(directory):
            self.start()

    def wait(self) -> None:
        """Wait until the process is ready. Raises EngineError where it cannot be started."""
        with self._lock:
            self._ready_process()

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a chat, up to where the assistant's message begins.

        Raises UsageError where the template refuses the messages or exceeds the limits, EngineError where the process
        cannot be started or ends for another reason.
        """
        try:
            chat = [dict(message) for message in messages]
            request = json.dumps({"template": template, "messages": chat, "variables": dict(variables)})
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"chat messages and template variables must hold what JSON can: {error}") from error
        with self._lock:
            answer = self._exchange(request.encode() + b"\n")
        if "text" in answer:
            return str(answer["text"])
        raise UsageError(f"the chat template refused the messages: {shown(answer.get('error', ''))[1:-1]}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        process = self._ready_process()
        end = time.monotonic() + self._limits.seconds
        try:
            _write(process, request, end)
            line = self._read_line(process, end, 12 * self._limits.characters + (1 << 16))
        except TimeoutError:
            self._stop()
            raise UsageError(
                f"the chat template took more than {self._limits.seconds:g} s for these messages and was stopped; "
                "shorten them, or give the prompt as text"
            ) from None
        except BrokenPipeError:
            line = b""
        except BaseException:  # Ctrl-C: the pending answer must not be read by the next call
            self._stop()
            raise
        return self._parse_answer(line, "render")

    def _ready_process(self) -> subprocess.Popen[bytes]:
        process = self._start()
        if not self._ready:
            try:
                self._parse_answer(self._read_line(process, time.monotonic() + _START_S, 1 << 16), "start")
            except TimeoutError:
                self._stop()
                raise EngineError(f"chat templates cannot be rendered: no process in {_START_S:g} s") from None
            self._ready = True
        return process

    def _parse_answer(self, line: bytes, doing: str) -> dict[str, Any]:
        """The process's answer. Where it is the last one, or missing, the next call starts another process."""
        answer: dict[str, Any] = json.loads(line) if line else {"last": True}
        if answer.get("last"):
            stderr = self._last_error_line()
            code = self._stop()
            if doing == "start":
                reason = answer.get("error") or f"exit code {code}{stderr and f': {stderr}'}"
                raise EngineError(f"chat templates cannot be rendered: {reason}")
            if "error" not in answer:
                raise EngineError(f"the process that renders chat templates ended with code {code}; try again")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        limits = json.dumps([self._limits.seconds, self._limits.memory_bytes, self._limits.characters])
        try:
            command = isolated(f"from {_MODULE} import main; main()", limits)
            self._errors = os.fdopen(os.memfd_create("stderr"), "w+b")  # a pipe would fill up
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ONE_THREAD},
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal must reach this process only
            )
        except EngineError as error:
            raise EngineError(f"chat templates cannot be rendered: {error}") from error
        except OSError as error:
            self._stop()
            raise EngineError(f"chat templates cannot be rendered: {command[0]} does not start: {error}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], end: float, most: int) -> bytes:
        """The process's next line; empty where it has ended or wrote more than `most` bytes. Raises TimeoutError."""
        assert process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            _wait(process.stdout.fileno(), select.POLLIN, end)
            chunk = os.read(process.stdout.fileno(), _PIPE_BYTES)
            line += chunk
            if not chunk or len(line) > most:
                return b""
        return bytes(line)

    def _last_error_line(self) -> str:
        """The last line that the process wrote to stderr."""
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return shown(lines[-1])[1:-1] if lines else ""

    def _stop(self) -> int | None:
        """Kill the process; returns its exit code."""
        process, self._process, self._ready = self._process, None, False
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if process is None:
            return None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return code

    def _reset_after_fork(self) -> None:
        """Drop the process in a forked child: it belongs to the parent."""
        self._lock = threading.Lock()
        self._process = None
        self._errors = None
        self._ready = False


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
start_for, wait, render = _shared.start_for, _shared.wait, _shared.render
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared._reset_after_fork)
