"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_sibling(path: Path) -> Path:
    """A new hidden name beside `path` that says which process it belongs to: `.NAME.tmp-PID-RANDOM`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8, with the permissions that the umask leaves, in place of what was there.

    Raises OSError; then what was there is as it was, and no temporary file stays behind.
    """
    temporary = temporary_sibling(path)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
