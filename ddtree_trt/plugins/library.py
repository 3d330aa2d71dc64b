"""Find the native libraries: `make plugins` puts them beside this file, the wheel ddtree-trt-cuda13 into its package.
Each contains its ABI number as text, so that a stale one is refused before any of its code runs."""

import mmap
import re
from importlib.util import find_spec
from pathlib import Path

from ddtree_trt.errors import MissingDependency
from ddtree_trt.plugins import ABI

PLUGINS = "libddtree_plugins.so"  # for TensorRT's registry
TORCH = "libddtree_torch.so"  # for `torch.ops`
NAMES = (PLUGINS, TORCH)

FOLDER = Path(__file__).parent
WHEEL = "ddtree_trt_cuda13"  # the package in the wheel ddtree-trt-cuda13
BUILD_HINT = "run `make plugins` in a checkout of ddtree-trt (needs nvcc 13; cpp_plugins/README.md has the rest)"
_MARKER = re.compile(rb"ddtree-plugin-abi=(\d+);")


def abi_of(path: Path) -> int | None:
    """The ABI number in a library's file, read without running it; None when there is none."""
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARKER.search(data)
        return int(found[1]) if found else None


def library_path(name: str) -> Path:
    """Where a native library is: beside this file, else in the installed wheel, else where it would be here."""
    wheel = find_spec(WHEEL)
    folders = [FOLDER, *(Path(place) for place in (wheel.submodule_search_locations if wheel else None) or ())]
    return next((folder / name for folder in folders if (folder / name).is_file()), FOLDER / name)


def find(name: str, folder: Path | None = None) -> Path:
    """The path of a native library, maybe in `folder`. Raises MissingDependency when it is missing or stale."""
    path = library_path(name) if folder is None else folder / name
    if not path.is_file():
        raise MissingDependency(f"native library {name} is not built: expected it at {path}; {BUILD_HINT}")
    abi = abi_of(path)
    if abi != ABI:
        raise MissingDependency(f"native library {path} has plugin ABI {abi}, this version needs {ABI}; {BUILD_HINT}")
    return path
