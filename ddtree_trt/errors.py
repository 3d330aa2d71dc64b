"""The errors a user can meet. Each message says what was expected, what was found and what to do.

`DDTreeError.exit_code` is what the command line ends with: 1 when the work failed, 2 when the call was wrong.
"""

import reprlib

SHOWN_CHARACTERS = 200


class DDTreeError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UsageError(DDTreeError, ValueError):
    """The call itself was wrong: an unknown option, a value out of range, a prompt that cannot fit."""

    exit_code = 2


class CheckpointError(DDTreeError):
    """A checkpoint is missing, damaged, unsupported, or does not fit its partner."""


class BuildError(DDTreeError):
    """An engine could not be built or written."""


class ArtifactError(DDTreeError):
    """An engine directory is missing, damaged, of another version, or was built for another machine."""


class EngineError(DDTreeError):
    """A loaded engine failed or produced values that cannot be used."""


class MissingDependency(DDTreeError):
    """An optional package or native library is not installed."""


class Shown(reprlib.Repr):
    """Values in messages: `reprlib`, of at most `longest` characters, and of what cannot be shown the type."""

    def __init__(self, longest: int = SHOWN_CHARACTERS) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = self.longest = longest

    def __call__(self, value: object) -> str:
        try:
            text = self.repr(value)
        except Exception:  # the value's own `__repr__`, or that of a number of thousands of digits
            text = f"a value of type {type(value).__name__}"
        return text if len(text) <= self.longest else text[: self.longest - 3] + "..."


shown = Shown()  # a caller's value for an error message


def told(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def install_with(extra: str = "") -> str:
    """The command that installs this package, with an extra of it. It is on no index, so it comes from its source tree;
    editable, because Python there meets the sources first, and only so they find the native module. Begins with an
    imperative, to stand after "; " in a message."""
    target = f"'.[{extra}]'" if extra else "."
    return f"run in a checkout of ddtree-trt: pip install --editable {target}"


MAX_COUNT = 1 << 20  # of things that each cost memory or time: far above any use, so a larger number is a mistake


def check_range(name: str, value: float, lowest: float, highest: float) -> None:
    """Raises UsageError where `value` is below `lowest`, above `highest`, or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise UsageError(f"{name} must be from {lowest} to {highest}, not {shown(value)}")
