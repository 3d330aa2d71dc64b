"""A GGUF checkpoint's file, or the files it was split into, as one: metadata of the first, tensors of all.

Headers are read, and values converted, by the `gguf` package; nothing else of ours calls it.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.tensor_files import StoredTensor
from ddtree_trt.build.checkpoint.tensorfile import check_finite, mapping
from ddtree_trt.build.sources import LocalSource
from ddtree_trt.errors import CheckpointError, MissingDependency, install_with
from ddtree_trt.reading import Between, Fields, Source, shown

ARCHITECTURE = "general.architecture"
_ADVICE, _DAMAGED = "use a file that llama.cpp's converter wrote", "the file is damaged or cut short, fetch it again"
_PARTS = Between(0, 99_999)  # as many as their names have digits for
_ROWS_BYTES = 4 << 20  # of stored rows that are converted at a time, which takes some ten times as much


@dataclass(frozen=True)
class GgufFile:
    paths: tuple[Path, ...]  # its parts, in order
    metadata: Fields  # by GGUF's keys
    tensors: Mapping[str, StoredTensor]  # by GGUF's names, with its types; last axis fastest

    @property
    def architecture(self) -> str:
        """The network's family, as GGUF calls it."""
        if not self.metadata.has(ARCHITECTURE):
            raise self.metadata.fault(ARCHITECTURE, "is missing: is this a language model?")
        return self.metadata.text(ARCHITECTURE)

    def names(self, wanted: Iterable[str], layers: int) -> dict[str, str]:
        """Hugging Face name → GGUF's, of tensors of a language model that the package knows."""
        gguf = _package()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        # llama.cpp's converter writes mistral as llama.
        table = gguf.get_tensor_name_map(numbers.get(self.architecture, gguf.MODEL_ARCH.LLAMA), layers)
        # Of a delta net the converter renames this one before it asks the table.
        asked = {name: name.replace(".dt_bias", ".dt_proj.bias") for name in wanted}
        return {name: table.get_name(other, (".weight", ".bias")) for name, other in asked.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """A float32 copy of one tensor. Raises CheckpointError when it cannot be read or holds NaN or Inf."""
        gguf, tensor = _package(), self.tensors[name]
        kind, width = gguf.GGMLQuantizationType[tensor.dtype], tensor.shape[-1]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, row_bytes = tensor.size // width, width // block * block_bytes
        with mapping(name, tensor):
            stored = np.memmap(tensor.file, np.uint8, mode="r", offset=tensor.offset, shape=(rows, row_bytes))
        values, step = np.empty((rows, width), np.float32), max(_ROWS_BYTES // row_bytes, 1)
        with np.errstate(all="ignore"):  # what is not finite is refused by name
            for start in range(0, rows, step):
                values[start : start + step] = gguf.quants.dequantize(stored[start : start + step], kind)
        check_finite(name, tensor, values.reshape(-1))
        return values.reshape(tensor.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF file, and of the other parts where it is the first of a split one. Raises
    CheckpointError for a file that is damaged, missing, or another part than the first, and MissingDependency."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: there is no such file")
    entries, tensors = _read_header(path)
    metadata = Fields(entries, Source(str(path), CheckpointError, _ADVICE))
    paths: tuple[Path, ...] = (path,)
    count = metadata.integer("split.count", _PARTS, 1)
    if count > 1:
        stem = LocalSource(path).engine_name
        paths = tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
        missing = [part.name for part in paths if not part.is_file()]
        if path != paths[0] or missing:
            needed = f"give the first, {paths[0].name}" if path != paths[0] else f"fetch {missing[0]} too"
            raise CheckpointError(f"{path} is one of {count} parts, which must lie beside each other; {needed}")
    for part in paths[1:]:
        _, more = _read_header(part)
        if twins := tensors.keys() & more.keys():
            raise Source(str(part), CheckpointError, _DAMAGED).fault(f"{shown(min(twins))} is in an earlier part too")
        tensors = tensors | more
    return GgufFile(paths, metadata, tensors)


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata by key, and tensors by name, of one file. Raises CheckpointError and MissingDependency."""
    try:
        state = file.stat()
        return _parse_header(file, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=16)  # a build asks for configuration, tensors and tokenizer, and a large one takes seconds
def _parse_header(file: Path, size: int, mtime_ns: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    gguf = _package()
    source = Source(str(file), CheckpointError, _DAMAGED)
    with file.open("rb") as stream:
        start = stream.read(8)
    if start == b"version ":
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
    if start[:4] != b"GGUF":
        problem = f"{file} is not a GGUF file: it begins with {shown(start[:4])}, not with b'GGUF'"
        raise CheckpointError(f"{problem}; give a GGUF file, or the directory of a Hugging Face checkpoint")

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """The package's, which alone would count as far as a damaged file says: here nothing is behind its end."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *others: Any, **options: Any) -> Any:
            values = super()._get(offset, dtype, count, *others, **options)
            if len(values) != count:
                raise ValueError(f"it goes on behind the end of the file, at byte {len(self.data)}")
            return values

    try:
        with np.errstate(all="raise"):
            reader = Reader(file)
        if reader.byte_order != "I":
            raise source.fault("its numbers are big-endian")
        metadata = {key: _value(gguf, field) for key, field in reader.fields.items()}
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise source.fault(" ".join(str(error).split())) from error
    tensors: dict[str, StoredTensor] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            problem = f"{file}: {tensor.name} is stored as {kind.name}, which the installed gguf package cannot convert"
            raise CheckpointError(f"{problem}; use a file of another type, or a newer gguf package") from error
        tensors[tensor.name] = StoredTensor(file, kind.name, tuple(tensor.shape.tolist()[::-1]), tensor.data_offset)
    return metadata, tensors


def _value(gguf: Any, field: Any) -> Any:
    """A number, text, flag, or list of them."""
    value = field.contents()
    if field.types[-1:] != [gguf.GGUFValueType.FLOAT32]:
        return value
    # A float32 as the shortest decimal that is it: 1e-05 where a config.json has the same.
    return [float(str(np.float32(v))) for v in value] if isinstance(value, list) else float(str(np.float32(value)))


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency(f"GGUF files need the Python package gguf; {install_with('gguf')}") from error
    return gguf
