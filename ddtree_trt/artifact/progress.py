"""How callers follow long work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Gets how far long work is. Called often and from the working thread: it must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """`done` of `total` bytes or steps of `stage` are finished; the stage's last call has `done == total`."""


def no_progress(stage: str, done: int, total: int, /) -> None:
    """The `Progress` of callers that do not care."""
