"""The errors a user can meet. Each message says what was expected, what was found and what to do.

`DDTreeError.exit_code` is what the command line ends with: 1 when the work failed, 2 when the call was wrong.
"""

from __future__ import annotations


class DDTreeError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UsageError(DDTreeError, ValueError):
    """The call itself was wrong: an unknown option, a value out of range, a prompt that cannot fit."""

    exit_code = 2


class CheckpointError(DDTreeError):
    """A Hugging Face checkpoint is missing, damaged, unsupported, or does not fit its partner."""


class BuildError(DDTreeError):
    """An engine could not be built or written."""


class ArtifactError(DDTreeError):
    """An engine directory is missing, damaged, of another version, or was built for another machine."""


class EngineError(DDTreeError):
    """A loaded engine failed or produced values that cannot be used."""


class MissingDependency(DDTreeError):
    """An optional package or native library is not installed."""


def install_with(extra: str = "") -> str:
    """The command that installs this package, with an extra of it. It is on no index, so it comes from its source tree.

    Begins with an imperative, to stand after "; " in a message.
    """
    target = f"'.[{extra}]'" if extra else "."
    return f"run in a checkout of ddtree-trt: pip install {target}"
