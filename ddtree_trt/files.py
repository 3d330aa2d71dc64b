"""Writing files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_sibling(path: Path) -> Path:
    """A new hidden name in the directory of `path`, with the process id: `.NAME.tmp-PID-RANDOM`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, with the permissions of the umask; it replaces an existing one.

    Raises OSError; then an existing file is unchanged, and no temporary file is left.
    """
    temporary = temporary_sibling(path)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
