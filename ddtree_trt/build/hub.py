"""Downloads from the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_trt.errors import CheckpointError

# Files of weights, configuration and tokenizer. Never code: nothing downloaded is executed.
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# The same weights once more, in other layouts: in folders, and as their makers had them before Hugging Face's layout.
_UNUSED = ["*/*", "consolidated*"]


def download(
    repository: str, revision: str | None, option: str, patterns: Sequence[str] = PATTERNS, *, typed: bool = False
) -> Path:
    """The local snapshot of a hub repository, fetched on the first use, with progress bars on a terminal.

    Only files that match `patterns` are fetched. The directory's name is the commit. Raises CheckpointError that says
    what to do, and which `option` takes a local copy instead. `typed`: whether a user gave the name, and may have meant
    a path.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=_UNUSED)
        )
    except Exception as error:  # network, proxy, disk, access: the hub's errors have no common base
        reason = (str(error).strip().splitlines() or [""])[0]
        name = f"{repository}, which is no path here," if typed else repository
        raise CheckpointError(
            f"cannot download {name} ({type(error).__name__}: {reason}); {_advice(error, repository, revision)}"
            f"to use a local copy give {option} DIR"
        ) from error


def _advice(error: Exception, repository: str, revision: str | None) -> str:
    """What to do against an error, ending in "; or "; empty where only a local copy helps."""
    from huggingface_hub import errors

    log_in = "log in with: hf auth login"
    # The first is one of the second.
    if isinstance(error, errors.GatedRepoError):
        return f"accept its terms on https://huggingface.co/{repository} and {log_in}; or "
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"check the name, and if the repository is private {log_in}; or "
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no branch, tag or commit {revision!r}; or "
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "connect to the hub, which is needed once; or "
    return ""
