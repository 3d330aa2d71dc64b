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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.tokenizer_files import has_chat_template
from ddtree_trt.errors import UsageError, shown
from ddtree_trt.worker_process import WorkerProcess

_MODULE = "ddtree_trt.runtime.text.chat_template_worker"


@dataclass(frozen=True)
class Limits:
    """Limits of one rendering."""

    seconds: float = 5.0
    memory_bytes: int = 256 << 20  # beyond the memory of the process before it
    characters: int = 4 << 20  # of the text


class Renderer(WorkerProcess):
    """A process that renders chat templates, started and restarted when it is needed. Thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        argument = json.dumps([self._limits.seconds, self._limits.memory_bytes, self._limits.characters])
        super().__init__(_MODULE, argument, "chat templates cannot be rendered")

    def start_for(self, directory: Path) -> None:
        """`start` if the tokenizer in the directory has a chat template."""
        if has_chat_template(directory):
            self.start()

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
        try:
            answer = self.ask(request.encode() + b"\n", self._limits.seconds, 12 * self._limits.characters + (1 << 16))
        except TimeoutError:
            raise UsageError(
                f"the chat template took more than {self._limits.seconds:g} s for these messages and was stopped; "
                "shorten them, or give the prompt as text"
            ) from None
        if "text" in answer:
            return str(answer["text"])
        raise UsageError(f"the chat template refused the messages: {shown(answer.get('error', ''))[1:-1]}")


_shared = Renderer()
start_for, wait, render = _shared.start_for, _shared.wait, _shared.render
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared._reset_after_fork)
