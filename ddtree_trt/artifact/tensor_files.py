"""safetensors files: which tensors a file has and where, its header for writing, and values as the types it stores.

The `safetensors` library checks a header; tensors are mapped by their place in it, so that any type, and any part of a
tensor, can be read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ddtree_trt.errors import BuildError
from ddtree_trt.reading import Source, shown

# The format's types that are read. Those of quantised weights are their bytes: what they stand for needs scales.
STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype("u1"),
    "I8": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_ALIGNMENT = 64  # bytes: where the data of a mapped file begins, for code that reads 16 bytes and more at a time


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str  # safetensors' name: F32, F16, BF16, …
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def mapped(self) -> NDArray[Any]:
        """The stored values [size], read when they are used. `dtype` must be in `STORED`, and `size` not 0. Raises
        OSError or ValueError when the file has changed since its header was read."""
        return np.memmap(self.file, STORED[self.dtype], mode="r", offset=self.offset, shape=(self.size,))


Stored = Mapping[str, StoredTensor]  # by the tensor's name


def read_tensors(file: Path, source: Source) -> dict[str, StoredTensor]:
    """Tensor name → its place in a safetensors file. Raises the source's error for a file that is none, is cut short,
    or cannot be read."""
    try:
        with file.open("rb") as stream:
            if (start := stream.read(8)) == b"version ":
                raise source.error(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
            with safe_open(file, "np"):  # checks types, names, that tensors fill the file, and their sizes
                length = int.from_bytes(start, "little")
            entries = json.loads(stream.read(length))
    except OSError as error:
        raise source.fault(f"it cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError) as error:
        raise source.fault(str(error)) from error
    entries.pop("__metadata__", None)
    if odd := [name for name in entries if not name.isprintable()]:
        raise source.fault(f"{shown(odd[0])} is no name of a tensor")
    return {
        name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """The header of a safetensors file of these tensors, each with its type in `STORED` and its shape; their data
    follows it in the same order, without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + STORED[dtype].itemsize * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def encode(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
    """The values in float32, float16 or bfloat16, little-endian; bfloat16 as its bits in uint16, which has a buffer.
    `name` is what an error calls them. Raises BuildError when float16 cannot hold one."""
    if dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view("<u2")
    with np.errstate(over="ignore"):
        stored = values.astype({"float32": "<f4", "float16": "<f2"}[dtype], copy=False)
    if dtype == "float16" and not np.isfinite(stored).all():
        largest = float(np.abs(values).max())
        raise BuildError(f"{name} has weights up to {largest:g}, which fp16 cannot hold; use --precision bf16")
    return stored
