"""The safetensors files of a checkpoint: their tensors by name, read one at a time as float32.

Headers are checked in full when the files are opened. Data is mapped only while one tensor is converted: a mapping kept
open would count every page read so far as this process's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.files import NAME
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.tensor_files import StoredTensor, read_tensors
from ddtree_trt.drafters.tapped import INTEGER_TENSORS
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Fields, Source, read_object, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = tuple(dict.fromkeys(precision.safetensors for precision in PRECISIONS.values()))
_INTEGERS = ("I64", "I32")
_MAX_INDEX_BYTES = 32 << 20  # the largest published ones have some 10 MB
_ADVICE = "fetch the checkpoint again"
_CHECK_VALUES = 1 << 22  # values checked in one step, so that checking needs little memory


def open_tensors(directory: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    """The checkpoint's weight files in name order, and from their headers tensor name → its place. Raises
    CheckpointError where there are none, one is missing, or its header cannot be right."""
    tensors: dict[str, StoredTensor] = {}
    placed: dict[str, str] = {}  # tensor name → file name, of a sharded checkpoint
    path = directory / INDEX_FILE
    if path.is_file() and not (directory / SINGLE_FILE).is_file():
        source = Source(str(path), CheckpointError, _ADVICE)
        index = Fields(read_object(path, source, max_bytes=_MAX_INDEX_BYTES), source)
        if not (placed := index.optional("weight_map", dict[str, Annotated[str, NAME]])):
            raise index.fault("weight_map", "must name files beside it, found none")
    files = [directory / name for name in sorted(set(placed.values()))] if placed else [directory / SINGLE_FILE]
    for file in files:
        if not file.is_file() and placed:
            raise CheckpointError(f"{file} is missing, but {INDEX_FILE} names it; copy the whole checkpoint")
        if not file.is_file():
            found = sorted(p.name for p in directory.glob("pytorch_model*.bin"))
            hint = f"found {found[0]}: convert it to safetensors" if found else "is this a Hugging Face checkpoint?"
            raise CheckpointError(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}; {hint}")
        stored = read_tensors(file, Source(str(file), CheckpointError, f"the file is damaged or cut short, {_ADVICE}"))
        tensors |= {name: t for name, t in stored.items() if not placed or placed.get(name) == file.name}
    if lost := [name for name in placed if name not in tensors]:
        place = placed[lost[0]]
        raise CheckpointError(f"{directory / INDEX_FILE} puts {shown(lost[0])} in {place}, which does not hold it")
    return files, tensors


def check_dtype(name: str, tensor: StoredTensor) -> None:
    """Raises CheckpointError when the tensor's storage type cannot be converted."""
    known, advice = _FLOATS, "use the checkpoint before quantisation"
    if name in INTEGER_TENSORS:
        known, advice = _INTEGERS, "use the checkpoint as it was published"
    if tensor.dtype not in known:
        problem = f"{tensor.file}: {name} is stored as {tensor.dtype}; supported are {', '.join(known)}"
        raise CheckpointError(f"{problem}: {advice}")


def read_float32(name: str, tensor: StoredTensor) -> NDArray[np.float32]:
    """A float32 copy of one tensor, which has the values of `INTEGER_TENSORS` exactly. Raises CheckpointError when it
    cannot be read or holds NaN or Inf."""
    check_dtype(name, tensor)
    values = np.zeros(0, np.float32)
    if tensor.size:
        with mapping(name, tensor):
            values = np.array(tensor.mapped(), np.float32)
        check_finite(name, tensor, values)
    return values.reshape(tensor.shape)


def check_finite(name: str, tensor: StoredTensor, values: NDArray[np.float32]) -> None:
    """Raises CheckpointError where one of the values [n] of a tensor is NaN or Inf."""
    for start in range(0, values.size, _CHECK_VALUES):
        finite = np.isfinite(values[start : start + _CHECK_VALUES])
        if not finite.all():
            bad = start + int(finite.argmin())
            index = [int(i) for i in np.unravel_index(bad, tensor.shape)]
            raise CheckpointError(f"{tensor.file}: {name}{index} is {values[bad]}; weights must be finite")


def read_bytes(name: str, tensor: StoredTensor) -> NDArray[np.uint8]:
    """A copy of one quantised tensor as it is stored. Raises CheckpointError when it cannot be read."""
    with mapping(name, tensor):
        return np.array(tensor.mapped(), np.uint8).reshape(tensor.shape)


@contextmanager
def mapping(name: str, tensor: StoredTensor) -> Iterator[None]:
    """A block that maps a tensor's place in its file. Raises CheckpointError where the file belies its header."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file} changed while it was read: {name}: {error}") from error
