"""The published DDTree code, run from a local checkout of its repository on any device.

Nothing of it is kept here: it is imported from that checkout and runs unchanged. Stand-ins replace only what it
requires of its environment: a CUDA device to synchronise with, two packages that it imports and does not need for
decoding, and a cache that can be cropped to a length.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ddtree_trt.errors import MissingDependency, UsageError, install_with

REPOSITORY = "https://github.com/liranringel/ddtree"
_FILES = ("ddtree.py", "dflash.py", "model/dflash.py")
_MODULES = ("ddtree", "dflash", "model")
_STAND_INS: dict[str, dict[str, Any]] = {
    "loguru": {"logger": logging.getLogger(__name__)},
    "datasets": dict.fromkeys(("load_dataset", "Features", "Sequence", "Value")),
}


@dataclass(frozen=True)
class Published:
    """The checkout's modules."""

    ddtree: ModuleType
    dflash: ModuleType
    path: Path


def import_published(path: Path) -> Published:
    """Import the modules `ddtree` and `dflash` of a checkout.

    Raises UsageError when there is none, MissingDependency without PyTorch.
    """
    if missing := [name for name in _FILES if not (path / name).is_file()]:
        raise UsageError(
            f"expected a checkout of {REPOSITORY} at {path}, but it has no {missing[0]}; "
            f"get one with: git clone {REPOSITORY}"
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"the published DDTree code needs PyTorch; {install_with('torch')}")
    absent = [name for name in _STAND_INS if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in absent:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(_STAND_INS[name])
    sys.path.insert(0, str(path))
    try:
        modules = [importlib.import_module(name) for name in _MODULES]
        if "loguru" not in absent:
            sys.modules["loguru"].logger.disable("ddtree")  # it logs what the peer reports as `cpp_compact`
    finally:
        sys.path.remove(str(path))
        for name in absent:  # transformers must not find a `datasets` that is a stand-in
            del sys.modules[name]
    for module in modules:
        if not Path(str(module.__file__)).resolve().is_relative_to(path.resolve()):
            raise UsageError(f"a module called {module.__name__!r} was loaded from {module.__file__}, not from {path}")
    return Published(modules[0], modules[1], path)


def commit_of(path: Path) -> str:
    """The checkout's commit. Raises UsageError where there is none, or where files differ from it."""
    git = ["git", "-C", str(path)]
    try:
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"expected a git checkout of {REPOSITORY} at {path}: {error}") from error
    if changed:
        raise UsageError(f"expected an unmodified checkout of {REPOSITORY} at {path}, found changes:\n{changed}")
    return commit


@contextmanager
def adapted_libraries() -> Iterator[None]:
    """Patch PyTorch and transformers to behave as the published code expects, while it runs."""
    import torch
    from transformers import DynamicCache

    native_crop = DynamicCache.crop

    def crop(cache: Any, length: int) -> None:
        """Keep the first `length` tokens, as before transformers 5, which takes the number of tokens to remove."""
        if (excess := cache.get_seq_length() - length) > 0:
            native_crop(cache, -excess)

    with _replaced(DynamicCache, "crop", crop):
        if torch.cuda.is_available():
            yield
        else:
            with _replaced(torch.cuda, "synchronize", lambda *_: None):
                yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
