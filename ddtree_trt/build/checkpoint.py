"""A Hugging Face checkpoint as the graphs want it: dimensions, and tensors by name, one at a time.

Every tensor's presence, shape and storage type is checked from the files' headers when a checkpoint is loaded, so that
a wrong or half-copied checkpoint is refused by name before any work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import (
    LOCAL,
    CheckpointIdentity,
    DrafterDims,
    Progress,
    TransformerDims,
    no_progress,
    sha256_file,
)
from ddtree_trt.build.config import CONFIG, read_config
from ddtree_trt.build.tensorfile import StoredTensor, check_dtype, open_tensors, read_float32, weight_files
from ddtree_trt.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What some files hold beside the weights in use: a copy of tied weights, buffers, a drafter's unused embedding.
_IGNORED = (HEAD, EMBEDDING, "embed_tokens.weight")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_SHOWN = 3  # names in one complaint


@dataclass
class Checkpoint:
    """One network's weights and what its configuration says of them. `load_checkpoint` makes it."""

    directory: Path
    dims: TransformerDims  # DrafterDims for a DFlash drafter
    tie_word_embeddings: bool
    stop_token_ids: tuple[int, ...]
    name: str
    revision: str
    tensors: dict[str, StoredTensor] = field(repr=False)  # the tensors in use, by Hugging Face name
    _identity: CheckpointIdentity | None = field(default=None, repr=False)

    @property
    def is_dflash(self) -> bool:
        return isinstance(self.dims, DrafterDims)

    @property
    def num_values(self) -> int:
        """Values in all tensors in use."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def identity(self) -> CheckpointIdentity:
        """Name, revision and sha256; the files are read through on the first use."""
        return self.identify()

    def identify(self, progress: Progress = no_progress) -> CheckpointIdentity:
        """`identity`, with progress over config.json and the weight files. Raises CheckpointError."""
        if self._identity is None:
            files = sorted([self.directory / CONFIG, *weight_files(self.directory)])
            try:
                total = sum(file.stat().st_size for file in files)
                stage = f"identify {self.name}"
                digest = sha256_file(*files, report=lambda read: progress(stage, read, total))
            except OSError as error:
                raise CheckpointError(f"{self.directory} cannot be read: {error}") from error
            self._identity = CheckpointIdentity(self.name, self.revision, digest)
        return self._identity

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A float32 copy of one tensor. Raises CheckpointError for an unknown name, NaN or Inf."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        return read_float32(name, self.tensors[name])


def load_checkpoint(directory: Path, *, name: str | None = None, revision: str = LOCAL) -> Checkpoint:
    """Open a target, a DFlash drafter or an autoregressive drafter; no weight is read yet.

    Raises CheckpointError when the directory is not a checkpoint, is of an unsupported kind, or when a tensor is
    missing, superfluous, or of another shape than config.json says.
    """
    config = read_config(directory)
    stored = open_tensors(directory)
    dims = config.dims
    expected = drafter_shapes(dims) if isinstance(dims, DrafterDims) else target_shapes(dims, tied=config.tied)
    _check_tensors(directory, stored, expected)
    return Checkpoint(
        directory=directory,
        dims=dims,
        tie_word_embeddings=config.tied,
        stop_token_ids=config.stop_token_ids,
        name=name or directory.resolve().name,
        revision=revision,
        tensors={name: stored[name] for name in expected},
    )


def _layer_shapes(dims: TransformerDims, prefix: str) -> Shapes:
    """Shapes [out, in] of all layers and the final norm."""
    hidden, inner, head = dims.hidden_size, dims.intermediate_size, dims.head_dim
    shapes: Shapes = {}
    for i in range(dims.num_layers):
        layer = f"{prefix}layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (dims.num_heads * head, hidden),
            f"{layer}.self_attn.k_proj.weight": (dims.num_kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": (dims.num_kv_heads * head, hidden),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.self_attn.o_proj.weight": (hidden, dims.num_heads * head),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {f"{prefix}norm.weight": (hidden,)}


def target_shapes(dims: TransformerDims, *, tied: bool) -> Shapes:
    """Tensors of a target, or of an autoregressive drafter, by Hugging Face name."""
    table = (dims.vocab_size, dims.hidden_size)
    head = {} if tied else {HEAD: table}
    return {EMBEDDING: table} | _layer_shapes(dims, "model.") | head


def drafter_shapes(dims: DrafterDims) -> Shapes:
    """Tensors of a DFlash drafter; its embedding and head are the target's."""
    hidden = dims.hidden_size
    fc = {"fc.weight": (hidden, len(dims.tap_layers) * hidden), "hidden_norm.weight": (hidden,)}
    return fc | _layer_shapes(dims, "")


def _check_tensors(directory: Path, stored: dict[str, StoredTensor], expected: Shapes) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {_some(missing)}, which its {CONFIG} calls for; copy the whole checkpoint, "
            f"and the {CONFIG} that belongs to it"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{directory}: {name} has shape {list(stored[name].shape)}, its {CONFIG} calls for {list(shape)}; "
                f"use the {CONFIG} that belongs to these weights"
            )
        check_dtype(name, stored[name])
    unused = [n for n in stored if n not in expected and n not in _IGNORED and not n.endswith(_IGNORED_SUFFIX)]
    if unused:
        raise CheckpointError(
            f"{directory} holds {_some(unused)}, which its {CONFIG} has no place for; "
            "is it quantised, or another architecture?"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_pair(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raises CheckpointError when the drafter was not made for a target of this kind; says which number differs."""
    if target.is_dflash:
        raise CheckpointError(f"{target.directory} is a DFlash drafter, not a target; give it as --drafter")
    have, want = drafter.dims, target.dims
    _check_equal(drafter, "vocab_size", have.vocab_size, "the target's", want.vocab_size)
    if not isinstance(have, DrafterDims):
        return
    _check_equal(drafter, "hidden_size", have.hidden_size, "the target's", want.hidden_size)
    _check_equal(drafter, "num_target_layers", have.num_target_layers, "the target's layers", want.num_layers)
    outside = [i for i in have.tap_layers if not 0 <= i < want.num_layers]
    if outside:
        raise CheckpointError(
            f"drafter {drafter.name}: target_layer_ids {outside} are not layers of the target, which has "
            f"{want.num_layers}; use the drafter trained for this target"
        )
    if have.mask_token_id >= want.vocab_size:
        raise CheckpointError(
            f"drafter {drafter.name}: mask_token_id {have.mask_token_id} is not below vocab_size {want.vocab_size}; "
            "use the drafter trained for this target"
        )


def _check_equal(drafter: Checkpoint, name: str, found: int, whose: str, expected: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"drafter {drafter.name}: {name} is {found}, {whose} {expected}; use the drafter trained for this target"
        )
