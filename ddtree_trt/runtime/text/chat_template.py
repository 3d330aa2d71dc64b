"""Rendering of chat templates in a separate process, with limits of time, memory and size.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from files and modules, but not from loops
that never end or texts that double. There is one process for all engines of this one, started by the first rendering or
by `start_for`.
"""

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.tokenizer_files import has_chat_template
from ddtree_trt.errors import UsageError, shown
from ddtree_trt.worker_process import LimitReached, Limits, Work, WorkerProcess

LIMITS = Limits(cpu_seconds=5.0, memory_bytes=256 << 20)
MAX_CHARACTERS = 4 << 20


class Renderer(WorkerProcess):
    """A process that renders chat templates, started and restarted when it is needed. Thread-safe."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(f"{__name__}:rendering", limits, "chat templates cannot be rendered")

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
            answer = self.ask(request.encode())
        except LimitReached as limit:
            raise UsageError(
                f"the chat template {limit} for these messages and was stopped; shorten them, or give the prompt as "
                "text"
            ) from None
        if "text" in answer:
            return str(answer["text"])
        raise UsageError(f"the chat template refused the messages: {shown(answer['error'])[1:-1]}")


def rendering(_: None) -> Work:
    """What the process does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: Any) -> dict[str, Any]:
        try:
            rendered: Any = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                add_generation_prompt=True,
                **request["variables"],
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            return {"error": str(error)[:1000] or type(error).__name__}
        text = rendered[0][0]
        if len(text) > MAX_CHARACTERS:
            return {"error": f"its text has {len(text)} characters, more than the {MAX_CHARACTERS} allowed"}
        return {"text": text}

    return render


_shared = Renderer()
start_for, wait, render = _shared.start_for, _shared.wait, _shared.render
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared._reset_after_fork)
