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
