"""A GGUF checkpoint's file, or the files it was split into, as one: metadata of the first, tensors of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.tensor_files import StoredTensor
from ddtree_trt.build.checkpoint.gguf.header import Header, file_source, read_header
from ddtree_trt.build.checkpoint.gguf.quantised import TensorType, read_values
from ddtree_trt.build.checkpoint.paths import PART
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Between, Fields, Source, shown

_COUNT = "split.count"
_PARTS = Between(0, 99_999)  # as many as their names have digits for


@dataclass(frozen=True)
class GgufFiles:
    """What the headers of a checkpoint's files say."""

    paths: tuple[Path, ...]  # in order
    metadata: Fields  # by GGUF's keys
    tensors: Mapping[str, StoredTensor]  # by GGUF's names
    types: Mapping[str, TensorType]

    def read(self, name: str) -> NDArray[np.float32]:
        """A float32 copy of one tensor. Raises CheckpointError when it cannot be read or holds NaN or Inf."""
        return read_values(name, self.tensors[name], self.types[name])


def open_gguf(path: Path) -> GgufFiles:
    """Read the headers of a GGUF file, and of the other parts where it is the first of a split one.

    Raises CheckpointError for a file that is damaged, missing, or another part than the first, and MissingDependency.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: there is no such file")
    first = read_header(path)
    metadata = Fields(first.metadata, Source(str(path), CheckpointError, "use a file that llama.cpp's converter wrote"))
    count = metadata.integer(_COUNT, _PARTS, 0)
    paths = _parts(path, metadata, count) if count > 1 else (path,)
    headers = [first, *(_read_part(part, count) for part in paths[1:])]
    tensors: dict[str, StoredTensor] = {}
    types: dict[str, TensorType] = {}
    for part, header in zip(paths, headers, strict=True):
        if twins := tensors.keys() & header.tensors.keys():
            raise file_source(part).fault(f"{shown(min(twins))} is in an earlier part too")
        tensors |= header.tensors
        types |= header.types
    expected = metadata.integer("split.tensors.count", Between(0, 1 << 31), len(tensors))
    if expected != len(tensors):
        raise metadata.fault("split.tensors.count", f"is {expected}, but its parts hold {len(tensors)}")
    return GgufFiles(paths, metadata, tensors, types)


def _parts(path: Path, metadata: Fields, count: int) -> tuple[Path, ...]:
    """The files of a split checkpoint, whose first one is `path`."""
    name = PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, so it must be named NAME-00001-of-{count:05}.gguf and lie beside the "
            "others; rename it, or join the parts with llama.cpp's llama-gguf-split"
        )
    parts = tuple(path.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if metadata.integer("split.no", _PARTS, 0) != 0 or path != parts[0]:
        raise CheckpointError(f"{path} is not the first of {count} parts; give {parts[0]}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts, and {shown(missing[0])} is not beside it; fetch all {count}"
        )
    return parts


def _read_part(path: Path, count: int) -> Header:
    header = read_header(path)
    found = header.metadata.get(_COUNT)
    if found != count:
        raise file_source(path).fault(f"{_COUNT} is {shown(found)}, but {count} in the first part")
    return header
