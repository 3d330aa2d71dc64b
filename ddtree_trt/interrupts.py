"""Ctrl-C on the command line: exit code 130 without a word, whenever it comes.

While the program starts and ends there is nothing to clean up, and the process ends at once. In between, while a
command works, KeyboardInterrupt is raised, so that unfinished work can be undone.

Imports nothing that takes time to load: until the first handler is set, Ctrl-C is a traceback of Python's own.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

EXIT_CODE = 130  # as shells report a command that SIGINT ended
_RETRY_S = 0.02
_waiting_for_import = False
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
        if _waiting_for_import:
            os._exit(EXIT_CODE)


def happened() -> bool:
    """Whether KeyboardInterrupt has been raised here: a library may have converted it to another error that follows."""
    return _raised


def forgive(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, or what a library made of it. Then it is forgotten: the program goes on."""
    global _raised
    was, _raised = _raised or isinstance(error, KeyboardInterrupt), False
    return was


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import only when it is done, because extension modules convert the exception
    to another, print it or crash. A second Ctrl-C ends the process."""
    global _waiting_for_import, _raised
    if _waiting_for_import and number == signal.SIGINT:
        os._exit(EXIT_CODE)
    _waiting_for_import = _is_importing(frame)
    if not _waiting_for_import:
        _raised = True
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in this frame or an outer one."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
