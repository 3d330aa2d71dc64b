"""Options for the files and folders that commands write results into; - is stdout."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ddtree_trt.errors import UsageError

STDOUT = Path("-")


def prepare_folders(folders: Iterable[Path]) -> None:
    """Make folders. Raises UsageError for one that cannot be written, before hours of measuring."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write into {folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write into {folder}: it is not writable")


def folders_of(files: Iterable[Path | None]) -> list[Path]:
    """The folders of those that are files."""
    return [file.parent for file in files if file is not None and file != STDOUT]


def write_text(path: Path, text: str) -> None:
    if path == STDOUT:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        path.write_text(text, encoding="utf-8")
