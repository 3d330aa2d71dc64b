"""The worker process of `judge`: tries one constraint per line, each in a fork, whose end it survives.

Input: first the vocabulary, then constraints by field name. Output: first {"ready": true}, then {} for a constraint
that can be used, {"error"} with the sentence why not, or {"limit"} with the reason.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.runtime.structured.compiler import GrammarCompiler
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.runtime.text.chat_template_worker import discard_stderr, limit, mapped_bytes, send


class _Stored:
    """A tokenizer as the compiler reads it."""

    def __init__(self, text: str, special_tokens: dict[str, int]) -> None:
        self.backend_tokenizer = self
        self.to_str = lambda: text
        self.get_vocab = lambda: special_tokens


def main() -> None:
    limits = json.loads(sys.argv[1])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # only answers go to stdout
    text, special_tokens, vocab_size, stop_ids = json.loads(requests.readline())
    compiler = GrammarCompiler(_Stored(text, special_tokens), vocab_size, frozenset(stop_ids))
    try:
        compiler.try_out(StructuredOutput(regex="(?s:.)*"))  # loads what the forks share
    except DDTreeError as error:
        send(answers, {"error": str(error), "last": True})
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    discard_stderr()
    send(answers, {"ready": True})
    while line := requests.readline():
        send(answers, _tried(compiler, line, limits))


def _tried(compiler: GrammarCompiler, line: bytes, limits: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fork that tries the constraint."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The kernel ends it with a signal, whatever the library is doing.
            signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
            limit(resource.RLIMIT_STACK, limits["stack_bytes"])
            limit(resource.RLIMIT_AS, mapped_bytes() + limits["memory_bytes"])
            os.write(writing, json.dumps(_answer(compiler, line)).encode())
        except MemoryError:
            os.abort()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        return dict(json.loads(answer))
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGPROF:
        return {"limit": f"compiling it takes more than {limits['cpu_seconds']:g} s of a processor; make it smaller"}
    if ended_by == signal.SIGABRT:
        return {"limit": f"compiling it takes more than {limits['memory_bytes'] >> 20} MiB; make it smaller"}
    return {"limit": f"it is too deep for the grammar library, or too large (signal {ended_by}); make it smaller"}


def _answer(compiler: GrammarCompiler, line: bytes) -> dict[str, str]:
    try:
        compiler.try_out(StructuredOutput.from_mapping(json.loads(line)))
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:  # of the library's conversions, which may raise anything
        return {"limit": f"the grammar library failed on it ({type(error).__name__}: {error})"[:1000]}
    return {}
