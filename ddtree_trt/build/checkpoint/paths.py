"""What a path names that the user gave as a checkpoint: a directory of Hugging Face's layout, or a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path

GGUF = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")  # the name of a split file's part


def is_gguf(path: Path) -> bool:
    """Whether a path is to be read as a GGUF file: any file, and what would be one by its name."""
    return path.is_file() or (path.suffix.lower() == GGUF and not path.is_dir())


def checkpoint_name(path: Path) -> str:
    """What the manifest calls a local checkpoint: the directory's name, or the file's as the user gave it, which in a
    hub's cache is a link to a file that has a digest for a name."""
    return path.name if is_gguf(path) else path.resolve().name
