"""GGUF's types of tensors, and what their bytes stand for. The one user of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.tensor_files import StoredTensor
from ddtree_trt.build.checkpoint.tensorfile import FLOATS, check_finite, map_values, mapping
from ddtree_trt.errors import CheckpointError, MissingDependency, install_with
from ddtree_trt.reading import Source

_ROWS_BYTES = 4 << 20  # of stored rows that are converted at a time, which takes some ten times as much


@dataclass(frozen=True)
class TensorType:
    """How a tensor's values are stored: rows of whole blocks."""

    name: str  # F32, Q4_K, …
    block: int  # values in a block
    block_bytes: int


def tensor_types() -> dict[int, TensorType]:
    """The types that can be converted to float32, by their number in files. Raises MissingDependency."""
    gguf = _package()
    types = {}
    for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        found = TensorType(kind.name, block, block_bytes)
        try:
            _converter(found)(np.zeros((1, block_bytes), np.uint8))
        except NotImplementedError:  # the package's word for a type that it knows by name and size only
            continue
        types[int(kind)] = found
    return types


def type_name(number: int) -> str:
    """The name of a type, of one that cannot be converted too; the number of one that the package does not know."""
    try:
        return str(_package().GGMLQuantizationType(number).name)
    except ValueError:
        return f"type {number}"


def read_values(name: str, tensor: StoredTensor, kind: TensorType) -> NDArray[np.float32]:
    """A float32 copy of one tensor; `name` is its name in the file. Besides the copy it takes some tens of megabytes.

    Raises CheckpointError when it cannot be read or holds NaN or Inf.
    """
    values = np.array(map_values(name, tensor), np.float32) if kind.name in FLOATS else _dequantised(name, tensor, kind)
    check_finite(name, tensor, values)
    return values.reshape(tensor.shape)


def _dequantised(name: str, tensor: StoredTensor, kind: TensorType) -> NDArray[np.float32]:
    """The values [n] of a quantised tensor, converted a few rows at a time."""
    convert, width = _converter(kind), tensor.shape[-1]
    row_bytes = width // kind.block * kind.block_bytes
    shape = (tensor.size // width, row_bytes)
    with mapping(name, tensor):
        stored = np.memmap(tensor.file, np.uint8, mode="r", offset=tensor.offset, shape=shape)
    values = np.empty((shape[0], width), np.float32)
    step = max(_ROWS_BYTES // row_bytes, 1)
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        for start in range(0, shape[0], step):
            values[start : start + step] = convert(stored[start : start + step])
    return values.reshape(-1)


def _converter(kind: TensorType) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Rows of stored bytes [rows, bytes] → their values [rows, n]."""
    gguf = _package()
    number = gguf.GGMLQuantizationType[kind.name]
    return lambda rows: gguf.quants.dequantize(rows, number)


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency(f"GGUF files need the Python package gguf; {install_with('gguf')}") from error
    return gguf


def unknown_type(number: int, name: str, known: dict[int, TensorType], source: Source) -> CheckpointError:
    """The refusal of a tensor whose type cannot be converted."""
    names = ", ".join(kind.name for kind in known.values())
    return CheckpointError(
        f"{source.where}: {name} is stored as {type_name(number)}, the installed gguf package converts {names}; "
        "use a file of one of these types, or a newer gguf package"
    )
