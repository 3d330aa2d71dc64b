"""Progress reports of long work."""

from typing import Protocol


class Progress(Protocol):
    """A callback for progress. It is called often, from the working thread: it must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """`done` of `total` bytes or steps of `stage` are finished; the stage's last call has `done == total`."""


def no_progress(stage: str, done: int, total: int, /) -> None:
    """A `Progress` that ignores every report."""
