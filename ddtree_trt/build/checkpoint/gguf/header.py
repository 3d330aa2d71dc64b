"""Headers of GGUF files: metadata by key, and which tensors a file has, of which type and shape, and where.

The gguf package's own reader is not used: it makes an array of every piece of every text (160 MB and two seconds of a
vocabulary of 49,152 tokens), and counts as far as a damaged file says.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt.artifact.tensor_files import StoredTensor
from ddtree_trt.build.checkpoint.gguf.quantised import TensorType, tensor_types, unknown_type
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Between, Source, shown

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # of tensors, in bytes, where the metadata does not say
_MAX_AXES, _EXTENT = 4, Between(1, 1 << 40)
_TEXT, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_TYPES: Mapping[int, np.dtype[Any]] = {**{n: np.dtype(t) for n, t in _NUMBERS.items()}, _BOOL: np.dtype("?")}


@dataclass(frozen=True)
class Header:
    """One file's header."""

    metadata: dict[str, Any]  # key → number, text, or list of them
    tensors: dict[str, StoredTensor]  # by GGUF's names; shapes as NumPy has them, last axis fastest
    types: dict[str, TensorType]  # of the tensors


def file_source(file: Path) -> Source:
    """How a damaged file is reported."""
    return Source(str(file), CheckpointError, "the file is damaged or cut short, fetch it again")


def read_header(file: Path) -> Header:
    """The header of one GGUF file. Raises CheckpointError for a file that is none or is cut short, and
    MissingDependency."""
    source, types = file_source(file), tensor_types()
    try:
        with file.open("rb") as stream:
            _check_magic(stream.read(8), file)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(data, file, source, types).header()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _check_magic(start: bytes, file: Path) -> None:
    if start == b"version ":
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
    if start[:4] != _MAGIC:
        raise CheckpointError(
            f"{file} is not a GGUF file: it begins with {shown(start[:4])}, not with {_MAGIC!r}; give a GGUF file, or "
            "the directory of a Hugging Face checkpoint"
        )
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in _VERSIONS:
        kind = "big-endian" if int.from_bytes(start[4:], "big") in _VERSIONS else f"of GGUF version {version}"
        raise CheckpointError(
            f"{file} is {kind}; little-endian files of version {' or '.join(map(str, _VERSIONS))} can be read: "
            "convert the model again"
        )


class _Parser:
    """Reads a file from its beginning. Whatever cannot be right raises the source's error."""

    def __init__(self, data: mmap.mmap, file: Path, source: Source, types: Mapping[int, TensorType]) -> None:
        self.data, self.file, self.source, self.known = data, file, source, dict(types)
        self.place = 8  # behind magic and version

    def header(self) -> Header:
        tensor_count, key_count = self._whole("<Q"), self._whole("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text()
            if key in metadata:
                raise self.source.fault(f"{shown(key)} is there twice")
            metadata[key] = self._value(self._whole("<I"))
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.source.fault(f"general.alignment must be a power of two, found {shown(alignment)}")
        start = -(-self.place // alignment) * alignment
        header = Header(metadata, {}, {})
        for name, shape, number, offset in entries:
            if name in header.tensors:
                raise self.source.fault(f"{shown(name)} is there twice")
            kind = header.types[name] = self._type(name, shape, number)
            end = start + offset + math.prod(shape) // kind.block * kind.block_bytes
            if offset % alignment:
                raise self.source.fault(f"{shown(name)} begins at byte {offset}, no multiple of {alignment}")
            if end > len(self.data):
                raise self.source.fault(f"{shown(name)} ends {end - len(self.data)} bytes behind the end of the file")
            header.tensors[name] = StoredTensor(self.file, kind.name, shape, start + offset)
        return header

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and offset in the data of the next tensor."""
        name = self._text()
        axes = self._whole("<I")
        if not 1 <= axes <= _MAX_AXES:
            raise self.source.fault(f"{shown(name)} has {axes} axes")
        extents = [self._whole("<Q") for _ in range(axes)]
        if any(extent not in _EXTENT for extent in extents):
            raise self.source.fault(f"{shown(name)} has shape {extents[::-1]}")
        return name, tuple(extents[::-1]), self._whole("<I"), self._whole("<Q")

    def _type(self, name: str, shape: tuple[int, ...], number: int) -> TensorType:
        kind = self.known.get(number)
        if kind is None:
            raise unknown_type(number, name, self.known, self.source)
        if shape[-1] % kind.block:
            raise self.source.fault(f"{shown(name)} {list(shape)} has rows of no whole {kind.name} blocks")
        return kind

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        inner, count = self._whole("<I"), self._whole("<Q")
        return [self._text() for _ in range(count)] if inner == _TEXT else self._numbers(inner, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _TYPES:
            raise self.source.fault(f"byte {self.place} of its header is of type {kind}, which GGUF has not")
        dtype = _TYPES[kind]
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        # A float32 as the shortest decimal that is it: 1e-05 where a config.json has the same.
        return [float(str(v)) for v in values] if dtype == np.float32 else values.tolist()

    def _text(self) -> str:
        data = self._take(self._whole("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.source.fault(f"a text of its header is no UTF-8: {shown(data[:40])}") from error

    def _whole(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _take(self, count: int) -> bytes:
        """The next bytes; of a count from the file, so the end is looked at before anything is allocated."""
        end = self.place + count
        if end > len(self.data):
            raise self.source.fault(f"its header goes on behind the end of the file, at byte {len(self.data)}")
        data, self.place = self.data[self.place : end], end
        return data
