"""The safetensors files of a checkpoint: which tensors there are, and one of them at a time as float32.

Headers are checked in full when the files are opened. Data is mapped only while one tensor is converted: a mapping kept
open would count every page read so far as this process's memory.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    # What quantised weights are: bytes here.
    "F8_E4M3": np.dtype("u1"),
    "I8": np.dtype("u1"),
    "U8": np.dtype("u1"),
}
_FLOATS = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100 << 20  # the format's own bound
_CHECK_VALUES = 1 << 22  # values looked at in one step, so that checking needs no memory to speak of


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str  # safetensors' name: F32, F16, BF16, …
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Tensor name → where it is, from the headers of the checkpoint's weight files. Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    placed = _placement(directory)
    for file in weight_files(directory):
        for name, tensor in _read_header(file).items():
            if placed is None or placed.get(name) == file.name:
                tensors[name] = tensor
    for name, file_name in (placed or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{directory / INDEX_FILE} puts {name} in {file_name}, which does not hold it")
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's weight files in name order. Raises CheckpointError when there are none or one is missing."""
    placed = _placement(directory)
    files = [directory / name for name in sorted(set(placed.values()))] if placed else [directory / SINGLE_FILE]
    for file in files:
        if file.is_file():
            continue
        if placed:
            raise CheckpointError(f"{file} is missing, but {INDEX_FILE} names it; copy the whole checkpoint")
        found = sorted(p.name for p in directory.glob("pytorch_model*.bin"))
        hint = f"found {found[0]}: convert it to safetensors" if found else "is this a Hugging Face checkpoint?"
        raise CheckpointError(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}; {hint}")
    return files


def _placement(directory: Path) -> dict[str, str] | None:
    """Tensor name → file name of a sharded checkpoint; None when the weights are in one file."""
    path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not path.is_file():
        return None
    try:
        placed = json.loads(path.read_bytes())["weight_map"]
        plain = bool(placed) and all(Path(name).name == name for name in placed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}); fetch the checkpoint again") from error
    if not plain:
        raise CheckpointError(f"{path}: weight_map must name files beside it; fetch the checkpoint again")
    return placed


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file, every entry checked against the file's size."""
    damaged = f"{file} is damaged or cut short"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{damaged}: its header of {length} bytes does not fit; fetch it again")
            header = json.loads(stream.read(length))
        tensors = {
            name: _entry(file, name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{damaged}: its header cannot be read ({error!r}); fetch it again") from error
    return tensors


def _entry(file: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    begin, end = (int(x) for x in entry["data_offsets"])
    tensor = StoredTensor(file, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), data_start + begin)
    stored = _STORED.get(tensor.dtype)
    if stored is not None and end - begin != tensor.size * stored.itemsize:
        raise CheckpointError(f"{file} is damaged: {name} {list(tensor.shape)} {tensor.dtype} has {end - begin} bytes")
    if not 0 <= begin <= end <= file_size - data_start:
        raise CheckpointError(f"{file} is cut short: {name} ends behind the end of the file; fetch it again")
    return tensor


def check_dtype(name: str, tensor: StoredTensor) -> None:
    """Raises CheckpointError when the tensor's storage type cannot be converted."""
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{tensor.file}: {name} is stored as {tensor.dtype}; supported are {', '.join(_FLOATS)}: "
            "use the checkpoint before quantisation"
        )


def read_float32(name: str, tensor: StoredTensor) -> NDArray[np.float32]:
    """A float32 copy of one tensor. Raises CheckpointError when it cannot be read or holds NaN or Inf."""
    check_dtype(name, tensor)
    if tensor.size == 0:
        return np.empty(tensor.shape, np.float32)
    source = _mapped(name, tensor)
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        bits = np.array(source, np.uint32)
        bits <<= 16
        values = bits.view(np.float32)
    else:
        values = np.array(source, np.float32)
    check_finite(name, tensor, values)
    return values.reshape(tensor.shape)


def check_finite(name: str, tensor: StoredTensor, values: NDArray[np.float32]) -> None:
    """Raises CheckpointError where one of the values [n] of a tensor is NaN or Inf."""
    for start in range(0, values.size, _CHECK_VALUES):
        part = values[start : start + _CHECK_VALUES]
        if not (np.isfinite(part.max()) and np.isfinite(part.min())):
            bad = start + int(np.flatnonzero(~np.isfinite(part))[0])
            index = [int(i) for i in np.unravel_index(bad, tensor.shape)]
            raise CheckpointError(f"{tensor.file}: {name}{index} is {values[bad]}; weights must be finite")


def read_bytes(name: str, tensor: StoredTensor) -> NDArray[np.uint8]:
    """A copy of one quantised tensor as it is stored. Raises CheckpointError when it cannot be read."""
    return np.array(_mapped(name, tensor), np.uint8).reshape(tensor.shape)


def _mapped(name: str, tensor: StoredTensor) -> NDArray[Any]:
    try:
        return np.memmap(tensor.file, _STORED[tensor.dtype], mode="r", offset=tensor.offset, shape=(tensor.size,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file} changed while it was read: {name}: {error}") from error
