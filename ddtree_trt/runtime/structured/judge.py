"""The trial of constraints in a process of their own, with limits of time and memory.

A grammar of sixty bytes may take minutes to compile, gigabytes, or the stack of the library's recursion, with which the
whole process ends. So those of strangers are tried elsewhere first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.structured.matcher import refused
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.worker_process import WorkerProcess

_MODULE = "ddtree_trt.runtime.structured.judge_worker"
_CANNOT = "constraints cannot be tried"
_ANSWER_S = 60.0  # the process holds itself to a limit of its own time; this one is for a machine that does not run it
_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Limits of one trial: compiling a constraint and two steps."""

    cpu_seconds: float = 1.0
    memory_bytes: int = 128 << 20  # beyond the memory of the process before it
    stack_bytes: int = 1 << 20  # half of the least that a thread of this process has


class Judge(WorkerProcess):
    """A process that tries constraints, started when it is needed. Thread-safe."""

    def __init__(
        self,
        tokenizer: str,
        special_tokens: Mapping[str, int],
        vocab_size: int,
        stop_ids: frozenset[int],
        limits: Limits | None = None,
    ) -> None:
        """`tokenizer`: its JSON text; the others as for GrammarCompiler."""
        vocabulary = [tokenizer, special_tokens, vocab_size, sorted(stop_ids)]
        argument = json.dumps(asdict(limits or Limits()))
        super().__init__(_MODULE, argument, _CANNOT, json.dumps(vocabulary).encode() + b"\n")

    def check(self, structured: StructuredOutput) -> None:
        """Raises UsageError, which says why, for a constraint that cannot be used, EngineError where the process cannot
        be started or ends."""
        request = json.dumps(asdict(structured)).encode() + b"\n"
        try:
            answer = self.ask(request, _ANSWER_S, _ANSWER_BYTES)
        except TimeoutError:
            raise EngineError(f"{_CANNOT}: no answer in {_ANSWER_S:g} s; try again") from None
        if "limit" in answer:
            raise refused(structured, answer["limit"])
        if "error" in answer:
            raise UsageError(answer["error"])
