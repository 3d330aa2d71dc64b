"""Ctrl-C on the command line: exit code 130 without a word, whenever it comes.

While the program starts and ends there is nothing to clean up, and the process ends at once. In between, while a
command works, KeyboardInterrupt is raised, so that what was begun can be taken back.

Imports nothing that takes time to load: until the first handler is set, Ctrl-C is a traceback of Python's own.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

EXIT_CODE = 130  # what shells say of a command that SIGINT ended
_RETRY_S = 0.02
_waiting = False  # for an import to end
_raised = False


def end_at_once() -> None:
    """From here on Ctrl-C ends the process, unless its parent had it ignore SIGINT, as shells have background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def begin_work() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt. Without effect in a process that never called `end_at_once`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGALRM, _raise)
        signal.signal(signal.SIGINT, _raise)


def end_work() -> None:
    """From here on Ctrl-C ends the process again, if `begin_work` had changed that."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _end)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if _waiting:
            os._exit(EXIT_CODE)


def happened() -> bool:
    """Whether KeyboardInterrupt has been raised here: an error that follows may be what a library made of it."""
    return _raised


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, but not within an import: extension modules turn it into other errors, print it or crash. Then
    it is raised once the import is done; a second Ctrl-C ends the process."""
    global _waiting, _raised
    if _waiting and number == signal.SIGINT:
        os._exit(EXIT_CODE)
    _waiting = _imports(frame)
    if not _waiting:
        _raised = True
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
