"""Headers of safetensors files: which tensors a file has, of which type and shape, and where.

Somebody else may have written the file: everything in its header is checked before anything is allocated by it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.reading import Between, Pattern, Source, parse_json, read_record, shown

# The format's types as NumPy reads them: bfloat16 as its bits, quantised weights as bytes.
STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "I8": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
# Of one file: 1,000 quantised layers have a third of that, in 5 MB. The format allows headers of 100 MB, which take
# seconds to parse.
_MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 16 << 20
_MAX_AXES = 8
_EXTENT = Between(0, 1 << 40)
_OFFSET = Between(0, 1 << 62)
_DTYPE = Pattern("[A-Z0-9_]{1,16}", "a type of safetensors")
_TENSOR_NAME = r"[\w./:-]{1,256}"
_ALIGNMENT = 64  # bytes: where the data of a mapped file begins, for code that reads 16 bytes and more at a time


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file."""

    file: Path
    dtype: str  # safetensors' name: F32, F16, BF16, …
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def mapped(self) -> NDArray[Any]:
        """The stored values [size], read when they are used. `dtype` must be in `STORED`, and `size` not 0.

        Raises OSError or ValueError when the file has changed since its header was read.
        """
        return np.memmap(self.file, STORED[self.dtype], mode="r", offset=self.offset, shape=(self.size,))


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor."""

    dtype: Annotated[str, _DTYPE]
    shape: tuple[Annotated[int, _EXTENT], ...]
    data_offsets: tuple[Annotated[int, _OFFSET], Annotated[int, _OFFSET]]  # begin and end, from the header's end


@dataclass(frozen=True)
class Header:
    """A file's header. Its entries are checked one by one; `locate` checks them against each other and the file."""

    file: Path
    file_bytes: int
    data_start: int  # bytes from the start of the file
    entries: Mapping[str, Entry]
    source: Source

    def locate(self) -> dict[str, StoredTensor]:
        """Tensor name → its place. As the format demands, tensors must follow each other without gaps and fill the
        file; otherwise raises the source's error."""
        for name, entry in self.entries.items():
            self._check_size(name, entry)
        tensors, end = {}, 0
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].data_offsets):
            begin, tensor_end = entry.data_offsets
            if begin != end:
                raise self.source.fault(f"{name} begins at byte {begin} of the data, where {end} was to come")
            tensors[name] = StoredTensor(self.file, entry.dtype, entry.shape, self.data_start + begin)
            end = tensor_end
        excess = self.data_start + end - self.file_bytes
        if excess > 0:
            raise self.source.fault(f"{name} ends {excess} bytes behind the end of the file")
        if excess < 0:
            raise self.source.fault(f"{-excess} bytes behind its last tensor belong to none")
        return tensors

    def _check_size(self, name: str, entry: Entry) -> None:
        """Raises the source's error where a tensor's length is not that of its shape and type."""
        stored, (begin, end) = STORED.get(entry.dtype), entry.data_offsets
        if end < begin or (stored is not None and end - begin != math.prod(entry.shape) * stored.itemsize):
            raise self.source.fault(f"{name} {list(entry.shape)} {entry.dtype} has {end - begin} bytes")


def read_header(file: Path, source: Source) -> Header:
    """The header of one safetensors file. Raises OSError, and the source's error for an invalid one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise source.error(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise source.fault(f"its header of {length} bytes does not fit into it")
        if length > MAX_HEADER_BYTES:
            raise source.fault(f"its header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
        header = parse_json(stream.read(length), source)
    if not isinstance(header, dict):
        raise source.fault(f"its header is not a JSON object but {shown(header)}")
    return Header(file, size, 8 + length, _entries(header, source), source)


def _entries(header: dict[str, Any], source: Source) -> dict[str, Entry]:
    """Tensor name → entry."""
    if len(header) > _MAX_TENSORS:
        raise source.fault(f"its header names {len(header)} tensors, at most {_MAX_TENSORS} are supported")
    entries = {}
    for name, data in header.items():
        if name == "__metadata__":
            continue
        if not re.fullmatch(_TENSOR_NAME, name):
            raise source.fault(f"{shown(name)} is no name of a tensor")
        entry = entries[name] = read_record(Entry, data, source, name)
        if len(entry.shape) > _MAX_AXES:
            raise source.fault(f"{name} has {len(entry.shape)} axes")
    return entries


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
    return struct.pack("<Q", len(text)) + text
