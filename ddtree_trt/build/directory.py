"""Writing a directory so that it appears whole or not at all, whatever happens to the process in between."""

import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddtree_trt.artifact.files import MANIFEST, OF_THIS_MACHINE, sha256_files, temporary_sibling
from ddtree_trt.artifact.manifest import FileEntry
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import BuildError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_ASIDE = ".old"  # ends the name of an engine while another takes its place


def prepare_destination(destination: Path, *, force: bool, marker: str = MANIFEST) -> Path:
    """The resolved destination, after its parents were made and the leftovers of killed builds removed.

    An existing directory may be replaced only with `force`, and only if it holds `marker`, the file written last, so
    that a mistyped path never destroys a directory that is not ours. Raises BuildError when it must not be
    replaced or its parent cannot be written.
    """
    destination = destination.resolve()  # a link to an engine keeps pointing at the engine
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(destination)
        if destination.exists() and not destination.is_dir():
            raise BuildError(f"{destination} exists and is not a directory; choose another path")
        if destination.exists() and any(destination.iterdir()):
            if not (destination / marker).is_file():
                raise BuildError(f"{destination} exists and was not written by ddtree-trt; choose another path")
            if not force:
                raise BuildError(f"{destination} exists; give --force to replace it, or choose another path")
        probe = temporary_sibling(destination)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _cannot_write(destination, error) from error
    return destination


@contextmanager
def atomic_directory(destination: Path, *, force: bool, marker: str = MANIFEST) -> Iterator[Path]:
    """Yield a temporary sibling of `destination` that takes its place when the block ends without an error.

    Whatever goes wrong, an existing directory stays as it was and the temporary one is removed. A killed process leaves
    at most a hidden `.NAME.tmp-*` sibling, which the next build of the same name removes.
    Raises BuildError when the destination cannot be written or must not be replaced.
    """
    destination = prepare_destination(destination, force=force, marker=marker)
    temporary = temporary_sibling(destination)
    lock = -1
    try:
        try:
            temporary.mkdir()
            with suppress(OSError):  # a file system without locks: what is left of a killed build stays
                lock = _lock(temporary)
            yield temporary
            _replace(temporary, destination, force)
        except OSError as error:
            raise _cannot_write(destination, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange this is the old directory
        if lock >= 0:
            os.close(lock)


def _cannot_write(destination: Path, error: OSError) -> BuildError:
    reason = error.strerror or str(error)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason = f"{error.filename} is not a directory"
    hint = "free some space or choose another path" if error.errno == errno.ENOSPC else "choose another path"
    return BuildError(f"cannot write {destination}: {reason}; nothing was changed, {hint}")


def _lock(directory: Path) -> int:
    """Lock a directory for as long as this process lives; raises BlockingIOError when another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale(destination: Path) -> None:
    """Remove the leftovers of killed builds of this name, whose lock the kernel dropped with the process; restore an
    engine that one had renamed."""
    for sibling in list(destination.parent.glob(f".{glob.escape(destination.name)}.tmp-[0-9]*-[0-9a-f]*")):
        if sibling.is_symlink() or not sibling.is_dir():
            continue
        try:
            os.close(_lock(sibling))
        except OSError:  # a build that is running, or a file system without locks
            continue
        if sibling.suffix == _ASIDE and not destination.exists():
            os.rename(sibling, destination)
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _replace(temporary: Path, destination: Path, force: bool) -> None:
    """Rename `temporary` to `destination`, whose old content, if any, is afterwards at `temporary`. Where the file
    system can exchange two directories in one step a kill cannot fall in between. Without `force` only an empty
    directory is replaced, also when another build has filled it meanwhile: the kernel refuses."""
    if not force or not destination.exists():
        os.rename(temporary, destination)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    if exchange is not None:
        paths = os.fsencode(temporary), os.fsencode(destination)
        if exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
    aside = temporary.with_name(temporary.name + _ASIDE)
    os.rename(destination, aside)
    try:
        os.rename(temporary, destination)
    except BaseException:
        os.rename(aside, destination)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def describe_files(directory: Path, progress: Progress = no_progress) -> dict[str, FileEntry]:
    """Size and digest of every file in `directory` that a manifest lists, in name order."""
    paths = [p for p in sorted(directory.iterdir()) if p.name not in (MANIFEST, *OF_THIS_MACHINE)]
    return {path.name: FileEntry(size, sha256) for path, size, sha256 in sha256_files("digest files", paths, progress)}
