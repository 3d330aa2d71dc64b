"""The safetensors files of a checkpoint: which tensors there are, and one of them at a time as float32.

Headers are checked in full when the files are opened. Data is mapped only while one tensor is converted: a mapping kept
open would count every page read so far as this process's memory.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import NAME
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Between, Fields, Pattern, Source, parse_json, read_object, read_record, shown

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
_MAX_TENSORS = 100_000  # of one file; 1,000 quantised layers have a third of that
_EXTENT, _OFFSET, _MAX_AXES = Between(0, 1 << 40), Between(0, 1 << 62), 8
_DTYPE, _TENSOR_NAME = Pattern("[A-Z0-9_]{1,16}", "a type of safetensors"), r"[\w./:-]{1,256}"
_ADVICE = "fetch the checkpoint again"
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
            raise CheckpointError(f"{directory / INDEX_FILE} puts {shown(name)} in {file_name}, which does not hold it")
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
    source = Source(str(path), CheckpointError, _ADVICE)
    index = Fields(read_object(path, source, max_bytes=_MAX_HEADER_BYTES), source)
    placed: dict[str, str] = index.optional("weight_map", dict[str, Annotated[str, NAME]])
    if not placed:
        raise index.fault("weight_map", "must name files beside it, found none")
    return placed


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file. Its tensors lie one behind the other and fill the file: so the format."""
    source = Source(str(file), CheckpointError, f"the file is damaged or cut short, {_ADVICE}")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise source.fault(f"its header of {length} bytes does not fit into it")
            header = parse_json(stream.read(length), source)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(header, dict):
        raise source.fault(f"its header is not a JSON object but {shown(header)}")
    tensors, end = {}, 0
    for name, entry in sorted(_entries(header, source).items(), key=lambda item: item[1].data_offsets):
        begin, tensor_end = entry.data_offsets
        if begin != end:
            raise source.fault(f"{name} begins at byte {begin} of the data, where {end} was to come")
        tensors[name] = entry.at(file, 8 + length)
        end = tensor_end
    if 8 + length + end > size:
        raise source.fault(f"{name} ends {8 + length + end - size} bytes behind the end of the file")
    if 8 + length + end < size:
        raise source.fault(f"{size - 8 - length - end} bytes behind its last tensor belong to none")
    return tensors


@dataclass(frozen=True)
class _Entry:
    """A tensor as a header has it."""

    dtype: Annotated[str, _DTYPE]
    shape: tuple[Annotated[int, _EXTENT], ...]
    data_offsets: tuple[Annotated[int, _OFFSET], Annotated[int, _OFFSET]]

    def at(self, file: Path, data_start: int) -> StoredTensor:
        return StoredTensor(file, self.dtype, self.shape, data_start + self.data_offsets[0])


def _entries(header: dict[str, Any], source: Source) -> dict[str, _Entry]:
    """Name → entry, each as long as its shape and type say."""
    if len(header) > _MAX_TENSORS:
        raise source.fault(f"its header names {len(header)} tensors, at most {_MAX_TENSORS} are supported")
    entries = {}
    for name, data in header.items():
        if name == "__metadata__":
            continue
        if not re.fullmatch(_TENSOR_NAME, name):
            raise source.fault(f"{shown(name)} is no name of a tensor")
        entry = entries[name] = read_record(_Entry, data, source, name)
        if len(entry.shape) > _MAX_AXES:
            raise source.fault(f"{name} has {len(entry.shape)} axes")
        stored, (begin, end) = _STORED.get(entry.dtype), entry.data_offsets
        if end < begin or (stored is not None and end - begin != math.prod(entry.shape) * stored.itemsize):
            raise source.fault(f"{name} {list(entry.shape)} {entry.dtype} has {end - begin} bytes")
    return entries


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
