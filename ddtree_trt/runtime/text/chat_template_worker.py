"""The worker process of `chat_template`: reads one request per line and writes one answer per line.

Input: {"template", "messages", "variables"}. Output: first {"ready": true}, then for each line {"text"} or {"error"};
with "last" where this process can render no more.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from typing import Any, BinaryIO


def main() -> None:
    seconds, memory_bytes, characters = json.loads(sys.argv[1])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # only answers go to stdout
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except Exception as error:
        send(answers, {"error": f"{type(error).__name__}: {error}", "last": True})
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS has the limit and does not hold a process to it
        limit(resource.RLIMIT_AS, mapped_bytes() + memory_bytes)
    discard_stderr()
    send(answers, {"ready": True})
    for line in requests:
        # The parent kills this process in time; the kernel's limit serves where the parent is gone.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, math.ceil(spent.ru_utime + spent.ru_stime + 2 * seconds) + 1)
        send(answers, _answer(render_jinja_template, line, memory_bytes, characters))


def _answer(render: Any, line: bytes, memory_bytes: int, characters: int) -> dict[str, Any]:
    try:
        request = json.loads(line)
        texts, _ = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
        if len(texts[0]) > characters:
            return {"error": f"its text has {len(texts[0])} characters, more than the {characters} allowed"}
        return {"text": texts[0]}
    except MemoryError:
        return {"error": f"it needs more than the {memory_bytes >> 20} MiB allowed", "last": True}
    except Exception as error:  # a template is a program and may raise anything
        return {"error": str(error)[:1000] or type(error).__name__}


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, at most its hard limit, which is not changed."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def discard_stderr() -> None:
    """Send later output on stderr to /dev/null: the parent no longer reads it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)


def mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
