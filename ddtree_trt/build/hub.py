"""Downloads from the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_trt.build.presets import HubSource
from ddtree_trt.errors import CheckpointError

# Files of weights, configuration and tokenizer. Never code: nothing downloaded is executed.
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def download(source: HubSource, option: str, patterns: Sequence[str] = PATTERNS) -> Path:
    """The local snapshot of a hub repository, fetched on the first use, with progress bars on a terminal.

    Only files that match `patterns` are fetched. The directory's name is the commit. Raises CheckpointError that says
    which `option` takes a local copy instead.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(source.repository, revision=source.revision, allow_patterns=list(patterns)))
    except Exception as error:  # network, proxy, disk, access: the hub's errors have no common base
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"cannot download {source.repository} ({type(error).__name__}: {reason}); "
            f"to use a local copy give {option} DIR"
        ) from error
