"""The file of both graphs' weights, ONNX's external data."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from onnx import StringStringEntryProto, TensorProto

from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.tensor_files import encode
from ddtree_trt.build.graph.ops import TYPES

ALIGNMENT = 4096  # a memory page: the runtime can map a tensor instead of reading it
_WRITE_BLOCK = 32 << 20
_FLOATS = frozenset(precision.dtype for precision in PRECISIONS.values())


class WeightFile(AbstractContextManager["WeightFile"]):
    """Writes arrays one after another and returns ONNX initialisers that refer to them.

    An array is stored once under its key for both graphs: the drafter's embedding and head are the target's. Only the
    array being written is in memory. A context manager; `path` must not exist yet.
    """

    def __init__(self, path: Path, *, expected_bytes: int = 0, progress: Progress = no_progress) -> None:
        self._file = path.open("xb")
        self._name = path.name
        self._written: dict[str, TensorProto] = {}
        self._expected = expected_bytes
        self._done = 0
        self._progress = progress

    def add(self, key: str, make: Callable[[], np.ndarray], dtype: str = "float32") -> TensorProto:
        """The initialiser of `key`; `make` is called, and its array written in `dtype`, only if the key is new. Arrays
        of quantised values are their bytes, each with two values of int4. Raises OSError when the disk is full,
        BuildError when fp16 cannot hold a value, and whatever `make` raises."""
        known = self._written.get(key)
        if known is None:
            array = np.asarray(make(), order="C")
            if dtype in _FLOATS:
                array = encode(array, dtype, key)
            known = self._written[key] = self._write(key, array)
            known.data_type = TYPES[dtype]
            if dtype == "int4":
                known.dims[-1] *= 2
        tensor = TensorProto()
        tensor.CopyFrom(known)
        return tensor

    def _write(self, key: str, array: np.ndarray) -> TensorProto:
        """Append the array; the initialiser's data type is the caller's to set, NumPy having no bfloat16."""
        position = self._file.tell()
        offset = -(-position // ALIGNMENT) * ALIGNMENT
        self._file.write(bytes(offset - position))
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _WRITE_BLOCK):
            block = data[start : start + _WRITE_BLOCK]
            self._file.write(block)
            self._done += len(block)
            self._progress("write weights", self._done, max(self._done, self._expected))
        location = {"location": self._name, "offset": offset, "length": array.nbytes}
        return TensorProto(
            name=key,
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
            external_data=[StringStringEntryProto(key=k, value=str(v)) for k, v in location.items()],
        )

    def close(self) -> None:
        """Flush and close. Raises OSError when the disk is full."""
        self._file.close()
        self._progress("write weights", self._done, self._done)

    def __exit__(self, *_: object) -> None:
        self.close()
