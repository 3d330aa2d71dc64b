"""A checkpoint as builds read it: dimensions, and tensors by their Hugging Face names, one at a time.

Every tensor's presence, shape and storage type is checked from the files' headers when a checkpoint is loaded, so that
a wrong or half-copied checkpoint is refused by name before any work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import LOCAL, CheckpointIdentity
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.tensor_files import Stored, StoredTensor
from ddtree_trt.build.checkpoint.config import CONFIG, ModelConfig, read_config
from ddtree_trt.build.checkpoint.gguf.files import open_gguf
from ddtree_trt.build.checkpoint.gguf.network import (
    DIVISORS,
    read_gguf_config,
    read_tensor,
    stored_tensors,
    unused_tensors,
)
from ddtree_trt.build.checkpoint.hybrids import in_our_form
from ddtree_trt.build.checkpoint.outline import Outline
from ddtree_trt.build.checkpoint.scales import (
    CACHE_SCALES,
    WEIGHT,
    Scales,
    dequantize,
    find_scales,
    read_scales,
    scale_name,
)
from ddtree_trt.build.checkpoint.tensorfile import check_dtype, check_finite, open_tensors, read_bytes, read_float32
from ddtree_trt.build.sources import checkpoint_name, is_gguf
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.drafters.tapped import OWN_HEAD, TO_TARGET
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import EMBEDDING, HEAD, Shapes

# Tensors that some files hold and nothing uses: a copy of tied weights, and buffers. Dialects have those of drafters.
_IGNORED = (HEAD, EMBEDDING)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", *CACHE_SCALES)
_SHOWN_NAMES = 3  # in one message


@dataclass(frozen=True)
class Checkpoint(Outline):
    """One network's weights and configuration, made by `load_checkpoint`."""

    path: Path  # a directory of Hugging Face's layout, or a GGUF file
    files: tuple[Path, ...]  # all that its digest is over
    tie_word_embeddings: bool
    stop_token_ids: tuple[int, ...]
    revision: str
    tensors: dict[str, StoredTensor] = field(repr=False)  # the tensors in use, by Hugging Face name
    quantizers: dict[str, StoredTensor] = field(repr=False)  # scales of those that are quantised
    _read: Callable[[str], NDArray[np.float32]] = field(repr=False)  # one that has no scales, of a hybrid in our form

    def identify(self, progress: Progress = no_progress) -> CheckpointIdentity:
        """Name, revision and sha256; the files are read through. Raises CheckpointError."""
        try:
            total = sum(file.stat().st_size for file in self.files)
            stage = f"identify {self.name}"
            digest = sha256_file(*self.files, report=lambda read: progress(stage, read, total))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return CheckpointIdentity(self.name, self.revision, digest)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A float32 copy of one tensor, dequantised if need be, a hybrid's in our form. Raises CheckpointError for an
        unknown name, NaN or Inf."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        if scales := self.scales(name):
            values = dequantize(self.stored(name), scales)
            check_finite(name, self.tensors[name], values.reshape(-1))
            return values
        values = self._read(name)
        if name == TO_TARGET:
            ids, size = np.arange(len(values)) + values, self.dims.vocab_size
            problem = "stands for one token by two ids" if len(np.unique(ids)) < len(ids) else None
            if ids.min() < 0 or ids.max() >= size:
                problem = f"reaches from {ids.min():.0f} to {ids.max():.0f}, vocab_size is {size}"
            if problem:
                problem = f"{self.path}: {TO_TARGET}, added to its indices, {problem}"
                raise CheckpointError(f"{problem}; fetch the checkpoint again")
        return values

    def scales(self, name: str) -> Scales | None:
        """Scales of a quantised projection; None for another tensor. Raises CheckpointError for one of 0 or less."""
        if self.quantization is None or not self.is_quantized(name):
            return None
        return read_scales(name, self.tensors[name], self.quantization, self.quantizers)

    def is_quantized(self, name: str) -> bool:
        return scale_name(name, WEIGHT) in self.quantizers

    def with_rows_of_head(self, target: Checkpoint) -> Checkpoint:
        head = EMBEDDING if target.tie_word_embeddings else HEAD

        def read(name: str) -> NDArray[np.float32]:
            if name != OWN_HEAD:
                return self._read(name)
            offsets = np.rint(self.tensor(TO_TARGET)).astype(np.int64)
            return np.ascontiguousarray(target.tensor(head)[np.arange(len(offsets)) + offsets])

        tensors = {**self.tensors, OWN_HEAD: target.tensors[head]}
        return replace(super().with_rows_of_head(target), tensors=tensors, _read=read)

    def stored(self, name: str) -> NDArray[np.uint8]:
        return read_bytes(name, self.tensors[name])


def load_config(path: Path) -> ModelConfig:
    """What a checkpoint's config.json says, or a GGUF file's metadata. Raises CheckpointError, and MissingDependency
    where GGUF files cannot be read."""
    return read_gguf_config(open_gguf(path)) if is_gguf(path) else read_config(path)


def load_checkpoint(path: Path, *, name: str | None = None, revision: str = LOCAL) -> Checkpoint:
    """Open a target or a drafter; no weight is read yet. Raises CheckpointError when the path is not a checkpoint, is
    of an unsupported kind, or when a tensor is missing, superfluous, or of another shape than its configuration says;
    MissingDependency where GGUF files cannot be read."""
    opened = _open_gguf(path) if is_gguf(path) else _open_directory(path)
    config: ModelConfig = opened.pop("config")
    return Checkpoint(
        **{"name": name or checkpoint_name(path), "revision": revision, "path": path, "dims": config.dims, **opened},
        tie_word_embeddings=config.tied,
        stop_token_ids=config.stop_token_ids,
        quantization=config.quantization,
        skipped=config.dialect.skipped,
    )


def _open_directory(directory: Path) -> dict[str, Any]:
    """The configuration and fields of the `Checkpoint` in a directory of Hugging Face's layout."""
    config = read_config(directory)
    files, tensors = open_tensors(directory)
    stored = {config.dialect.our_name(name): tensor for name, tensor in tensors.items()}
    dims = config.dialect.settle(config.dims, stored)
    shapes = checkpoint_shapes(dims, tied=config.tied)
    quantizers = find_scales(directory, config.quantization, stored, shapes)
    as_stored = dict(shapes)
    for weight in (name for name in shapes if name in stored):
        if config.quantization and scale_name(weight, WEIGHT) in quantizers:
            as_stored[weight] = config.quantization.stored_shape(shapes[weight])
        else:
            check_dtype(weight, stored[weight])
    unused = config.dialect.unused
    ignored = {n for n in stored if n in _IGNORED or n.endswith(_IGNORED_SUFFIXES) or n.startswith(unused)}
    _check_tensors(directory, CONFIG, stored, as_stored, {*quantizers, *ignored})
    return {
        "config": config,
        "dims": dims,
        "files": tuple(sorted([directory / CONFIG, *files])),
        "tensors": {name: stored[name] for name in shapes},
        "shapes": shapes,
        "quantizers": quantizers,
        "_read": lambda name: in_our_form(name, read_float32(name, stored[name]), dims),
    }


def _open_gguf(path: Path) -> dict[str, Any]:
    """The same of a GGUF file."""
    file = open_gguf(path)
    config = read_gguf_config(file)
    shapes = checkpoint_shapes(config.dims, tied=config.tied)
    stored = stored_tensors(file, shapes, config.dims)
    expected = {name: shape for some in stored.values() for name, shape in some.items()}
    _check_tensors(path, "metadata", file.tensors, expected, {DIVISORS, *unused_tensors(file, config.dims)})
    return {
        "config": config,
        "files": file.paths,
        "tensors": {name: file.tensors[next(iter(stored[name]))] for name in shapes},
        "shapes": shapes,
        "quantizers": {},
        "_read": lambda name: read_tensor(file, stored[name], shapes[name], config.dims),
    }


def _check_tensors(path: Path, config: str, stored: Stored, expected: Shapes, known: Collection[str]) -> None:
    """Raises CheckpointError for a tensor that is missing or of another shape than expected, and for those neither
    expected nor known. `config` is what calls for them."""
    if missing := [name for name in expected if name not in stored]:
        raise CheckpointError(f"{path} lacks {_listed(missing)}, which its {config} calls for; copy the whole one")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            problem = f"{path}: {name} has shape {list(stored[name].shape)}, its {config} calls for {list(shape)}"
            raise CheckpointError(f"{problem}; use the {config} that belongs to these weights")
    if unused := [name for name in stored if name not in expected and name not in known]:
        problem = f"{path} holds {_listed(unused)}, which its {config} has no place for"
        raise CheckpointError(f"{problem}; is it quantised, or another architecture?")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
