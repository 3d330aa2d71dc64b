"""The process of `chat_template`: a rendering per line of input, its answer a line of output.

Input: {"template", "messages", "variables"}. Output: first {"ready": true}, then for each line {"text"} or {"error"};
with "last" where this process is of no further use.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Answer until the input ends."""
    seconds, memory_bytes, characters = json.loads(sys.argv[1])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers is an answer
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except Exception as error:
        _send(answers, {"error": f"{type(error).__name__}: {error}", "last": True})
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _mapped_bytes() + memory_bytes)
    _silence()
    _send(answers, {"ready": True})
    for line in requests:
        # Whoever started this process ends it in time; this is for when that one is gone.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(spent.ru_utime + spent.ru_stime + 2 * seconds) + 1)
        _send(answers, _answer(render_jinja_template, line, memory_bytes, characters))


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
    except Exception as error:  # a template is a program of its own and raises what it likes
        return {"error": str(error)[:1000] or type(error).__name__}


def _limit(kind: int, most: int) -> None:
    """Limit this process, within the hard limit it was started with, which stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _silence() -> None:
    """What is written to stderr from here on is read by nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
