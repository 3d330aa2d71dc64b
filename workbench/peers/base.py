"""What a peer is, what it is made with, and a clock for streamed tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.build.sources import locate, named_source
from ddtree_trt.errors import UsageError
from ddtree_trt.trtllm_export import check_same


class Peer(Protocol):
    """Another implementation, made of a PeerContext and the value after NAME=; its runs are independent."""

    methods: Sequence[str]

    def describe(self) -> dict[str, str]:
        """Versions and settings that a reader of its figures must know."""

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        """Run one request from a cold cache. Raises DDTreeError when it cannot."""

    def close(self) -> None:
        """Release memory, processes and connections."""


@dataclass(frozen=True)
class PeerContext:
    """The engine a peer is compared with, and where its checkpoints are if the user says it."""

    engine: Path
    manifest: Manifest
    threads: int  # the engine's; a peer on the CPU uses as many
    checkpoint: str | None = None
    drafter: str | None = None
    assistant: str | None = None

    @property
    def dtype(self) -> str:
        """The PyTorch type of the engine's precision. No peer runs in 8 bits: beside an int8 engine they compute in the
        type that checkpoints are published in."""
        precision = PRECISIONS[self.manifest.precision]
        return "bfloat16" if precision.quantized else precision.dtype

    def checkpoints(self) -> tuple[Path, Path]:
        """The engine's target and drafter: those that are given, else its preset's. Raises UsageError when there are
        none, or when they are not the ones the engine was built from."""
        preset, found = PRESETS.get(self.manifest.name), []
        for option, given, source, identity in (
            ("--checkpoint", self.checkpoint, preset.target if preset else None, self.manifest.target),
            ("--drafter", self.drafter, preset.drafter if preset else None, self.manifest.drafter),
        ):
            wanted = source if given is None else named_source(given)
            if wanted is None:
                raise UsageError(f"peers need the checkpoint this engine was built from; give it as {option} PATH")
            found.append(locate(wanted, option).path)
            check_same(found[-1], identity, option)
        return found[0], found[1]


class TokenClock:
    """Arrival times of streamed tokens, from which an Outcome is made.

    A step of several tokens counts as one round of speculation, which is right unless the sender merges steps.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._steps: list[tuple[float, int]] = []

    def arrived(self, tokens: int) -> None:
        """Record a step of `tokens` new tokens."""
        if tokens > 0:
            self._steps.append((time.perf_counter(), tokens))

    def outcome(self, token_ids: Sequence[int] | None) -> Outcome:
        """The outcome of the request."""
        counts, times = [tokens for _, tokens in self._steps], [at for at, _ in self._steps] or [self._start]
        return Outcome(
            output_tokens=sum(counts),
            first_token_s=times[0] - self._start,
            decode_s=times[-1] - times[0],
            first_tokens=counts[0] if counts else 1,
            token_ids=None if token_ids is None else tuple(token_ids),
            acceptance_lengths=tuple(counts[1:]),
        )
