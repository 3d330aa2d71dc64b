"""Find the native libraries, check their ABI, and load the kernels once.

`make plugins` puts up to three libraries beside this file; the wheel ddtree-trt-cuda13 has all in a package of its own.
Each contains its ABI number as text, so that a stale one is refused before any of its code runs:

- the kernels behind a C interface, loaded here: `kernels()`;
- the TensorRT plugins, for the plugin registry's `load_library`: `find(PLUGINS)`;
- the torch operators, for `torch.ops.load_library`: `find(TORCH)`.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ddtree_trt.errors import EngineError, MissingDependency
from ddtree_trt.plugins import ABI

KERNELS = "libddtree_kernels.so"
PLUGINS = "libddtree_plugins.so"
TORCH = "libddtree_torch.so"
NAMES = (PLUGINS, KERNELS, TORCH)

FOLDER = Path(__file__).parent
WHEEL = "ddtree_trt_cuda13"  # the package in the wheel ddtree-trt-cuda13
BUILD_HINT = "run `make plugins` in a checkout of ddtree-trt (needs nvcc 13; cpp_plugins/README.md has the rest)"
_MARKER = re.compile(rb"ddtree-plugin-abi=(\d+);")


class _TreeAttention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v past_k past_v present_k present_v".split()),
        *((name, ctypes.c_void_p) for name in "slot_ids past_len tree_mask out workspace".split()),
        ("workspace_bytes", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in "sequences tokens q_heads kv_heads head_dim slots capacity".split()),
        *((name, ctypes.c_int32) for name in "mask_words type mask_mode".split()),
        ("scale", ctypes.c_float),
        ("splits", ctypes.c_int32),
    ]


class _TreeBuild(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "log_probs candidates root_tokens budgets past_len".split()),
        *((name, ctypes.c_void_p) for name in "token_ids parents depths positions log_weights counts".split()),
        *((name, ctypes.c_int32) for name in "sequences positions_l candidates_k tokens".split()),
    ]


class _PackedMask(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "parents mask".split()),
        *((name, ctypes.c_int32) for name in "sequences tokens mask_words".split()),
    ]


class _TreeWalk(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "parents token_ids choices counts past_len".split()),
        *((name, ctypes.c_void_p) for name in "path lengths next_tokens next_past_len".split()),
        *((name, ctypes.c_int32) for name in "sequences tokens".split()),
    ]


class _KvCompact(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "cache slot_ids past_len keep keep_count".split()),
        *((name, ctypes.c_int32) for name in "sequences planes slots kv_heads capacity max_keep row_bytes".split()),
    ]


# Function of the library → the structure it takes; include/ddtree/attention.h and round.h say what the fields mean.
CALLS: dict[str, type[ctypes.Structure]] = {
    "tree_attention": _TreeAttention,
    "build_tree": _TreeBuild,
    "packed_mask": _PackedMask,
    "walk": _TreeWalk,
    "compact": _KvCompact,
}

# Index = ddtree::Status of include/ddtree/launch.h.
STATUS = (
    "ok",
    "a pointer that must not be null is",
    "a negative or impossible extent",
    "a head size, element type or mode that has no kernel",
    "an address that is not a multiple of 16 bytes",
    "a workspace smaller than attention_workspace_bytes says",
    "a launch that CUDA refused",
)


class KernelLibrary:
    """The launchers. Pointers are device addresses as int, None for null; `stream` is a cudaStream_t as int.

    Nothing is synchronised: the arrays a call names must outlive the work it puts on the stream.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.ddtree_abi.restype = ctypes.c_int32
        self._library.ddtree_attention_workspace_bytes.restype = ctypes.c_uint64

    @property
    def abi(self) -> int:
        """The ABI number compiled into the library."""
        return int(self._library.ddtree_abi())

    def attention_workspace_bytes(self, **fields: object) -> int:
        """Bytes of scratch a `tree_attention` call of these extents needs; 0 when it needs none."""
        return int(self._library.ddtree_attention_workspace_bytes(ctypes.byref(_TreeAttention(**fields))))

    def launch(self, call: str, stream: int | None = None, **fields: object) -> None:
        """Put one of `CALLS` on a stream; fields left out are null or 0. Raises EngineError when it is refused."""
        status = getattr(self._library, f"ddtree_{call}")(ctypes.byref(CALLS[call](**fields)), ctypes.c_void_p(stream))
        if status:
            raise EngineError(f"ddtree kernel {call!r} refused its arguments: {STATUS[status]} (status {status})")


def abi_of(path: Path) -> int | None:
    """The ABI number in a library's file, read without running it; None when there is none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARKER.search(data)
        return int(found[1]) if found else None


def is_current(path: Path) -> bool:
    """Whether there is a library whose ABI is this version's."""
    return path.is_file() and path.stat().st_size > 0 and abi_of(path) == ABI


def library_path(name: str) -> Path:
    """Where a native library is: beside this file, else in the installed wheel, else where it would be here."""
    wheel = find_spec(WHEEL)
    folders = [FOLDER, *(Path(place) for place in (wheel.submodule_search_locations if wheel else None) or ())]
    return next((folder / name for folder in folders if (folder / name).is_file()), FOLDER / name)


def find(name: str, folder: Path | None = None) -> Path:
    """The path of a native library, of the one in `folder` if it is given, after its ABI was checked.

    Raises MissingDependency when it is missing or stale.
    """
    path = library_path(name) if folder is None else folder / name
    if not path.is_file():
        raise MissingDependency(f"native library {name} is not built: expected it at {path}; {BUILD_HINT}")
    abi = abi_of(path)
    if abi != ABI:
        raise MissingDependency(f"native library {path} has plugin ABI {abi}, this version needs {ABI}; {BUILD_HINT}")
    return path


@cache
def kernels() -> KernelLibrary:
    """The CUDA kernels, loaded once per process."""
    path = find(KERNELS)
    try:
        return KernelLibrary(path)
    except OSError as error:
        raise MissingDependency(f"native library {path} cannot be loaded: {error}; {BUILD_HINT}") from error
