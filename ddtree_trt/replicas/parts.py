"""The parts of an offline run's output, from which a run that was interrupted goes on.

The requests are cut into parts of a fixed size, in the order of the file. The answers of a part are one file, which
appears whole, by a rename: a part either has every answer once, or is not there. When all are there they are joined, by
a rename too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddtree_trt.errors import DDTreeError, UsageError

_RUN = "run.json"  # what the parts are of
_FEWEST_ROWS = 32  # of a part: fewer would leave slots idle at its end
_MOST_PARTS = 4096


def rows_per_part(rows: int) -> int:
    return max(_FEWEST_ROWS, -(-rows // _MOST_PARTS))


class Parts:
    """The folder beside the output that has the finished parts. Made by `open_parts`."""

    def __init__(self, output: Path, folder: Path, count: int) -> None:
        self._output = output
        self._folder = folder
        self._count = count

    def missing(self) -> list[int]:
        """Numbers of the parts that are still to be made."""
        return [number for number in range(self._count) if not self._file(number).exists()]

    def write(self, number: int, text: str) -> None:
        """Write a part. Raises DDTreeError where the disk does not take it."""
        path = self._file(number)
        _write_whole(path.with_suffix(".tmp"), (text,), path)

    def read(self) -> Iterator[str]:
        """The texts of all parts, in order."""
        return (self._file(number).read_text(encoding="utf-8") for number in range(self._count))

    def join(self) -> None:
        """Write the output, and remove the folder. Raises as `write` does."""
        _write_whole(self._folder / "whole", self.read(), self._output)
        shutil.rmtree(self._folder)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"


@contextmanager
def open_parts(output: Path, count: int, run: Mapping[str, object]) -> Iterator[Parts]:
    """The parts of the output: those of a run that was interrupted, or none.

    Args:
        run: what the answers follow from. Parts of a run that differs in any of it are not mixed with these.

    Raises UsageError when the output is there already, when the parts are another run's, or when a run that is still
    going on writes them.
    """
    folder = output.with_name(output.name + ".parts")
    if output.exists():
        raise UsageError(f"{output} is there already; remove it or choose another --output-file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}") from error
    with (folder / _RUN).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another run writes {output}; wait for it or choose another --output-file") from None
        file.seek(0)
        text = json.dumps(dict(run), sort_keys=True)
        if not (before := file.read()).strip().endswith("}"):  # none, or one that was killed while it wrote this
            try:
                file.truncate(0)
                file.write(text)
                file.flush()
            except OSError as error:
                raise _cannot_write(folder, error) from error
        elif before != text:
            was = json.loads(before)
            name = next(name for name in sorted({**was, **run}) if was.get(name) != run.get(name))
            raise UsageError(
                f"{folder} has parts of a run with another {name} ({was.get(name)}, here {run.get(name)}); go on with "
                "that one, or remove the folder"
            )
        yield Parts(output, folder, count)


def _write_whole(made: Path, texts: Iterable[str], path: Path) -> None:
    """Write the texts under one name and rename it. Raises DDTreeError where that cannot be done."""
    try:
        with made.open("w", encoding="utf-8") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> DDTreeError:
    return DDTreeError(
        f"cannot write {path}: {error.strerror}; free some space, then the same command goes on with what is there"
    )
