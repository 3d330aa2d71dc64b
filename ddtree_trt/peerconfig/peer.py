"""The record of one other inference engine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt.errors import UsageError
from ddtree_trt.peerconfig.pair import ServedPair

CONFIG = "config.yaml"
PLAIN_CONFIG = "plain.yaml"  # the same without speculation
PORT = 8000
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """An engine that runs DFlash's chain, and the configuration for it."""

    name: str  # of the command: export-NAME
    title: str
    release: str  # whose sources the names are from
    features: frozenset[str]  # fields of a drafter that it computes, beside those of the first DFlash drafters
    settings: Callable[[ServedPair], Settings]  # the content of its configuration file
    speculative: tuple[str, ...]  # the settings that switch speculation on
    command: Callable[[ServedPair], tuple[str, ...]]  # starts its server, with `--config FILE` and `--port N`
    notes: Callable[[ServedPair], tuple[str, ...]]  # what its configuration cannot say
    in_process: bool = False  # `bench` runs it by itself, from the file; the others are asked over HTTP

    def check(self, pair: ServedPair) -> None:
        """Raises UsageError for a drafter that it would compute otherwise, or refuse."""
        if other := [name for name in pair.features if name not in self.features]:
            raise UsageError(
                f"the drafter of {pair.name!r} has {', '.join(other)}, which DFlash of {self.title} {self.release} is "
                "not known to compute: its tokens could be accepted less often without an error; no export is written"
            )

    def plain(self, settings: Settings) -> Settings:
        """The settings without speculation."""
        return {key: value for key, value in settings.items() if key not in self.speculative}

    def command_line(self, pair: ServedPair, config: str) -> str:
        """The command for a shell; `config` is a word of it."""
        return f"{shlex.join(self.command(pair))} --config {config} --port {PORT}"
