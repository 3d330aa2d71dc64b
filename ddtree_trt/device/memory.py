"""The memory an engine takes, computed before anything is allocated and without CUDA.

`inspect` and `build --dry-run` print it. Letters as in `artifact`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import BACKENDS, Backend, BackendName, Place
from ddtree_trt.artifact.manifest import Limits, Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.device.buffers import (
    FLOAT_BYTES,
    NOT_COUNTED_AS_BUFFERS,
    RoundShapes,
    buckets,
    captured_passes,
    context_steps,
    pass_rows,
    tensorrt_buffers,
    tree_sizes,
)
from ddtree_trt.drafters.kind import EMBEDDING, HEAD
from ddtree_trt.drafters.registry import checkpoint_shapes, kind_of
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import HEAD_DIMS

# Per layer of a captured pass: nodes and arguments of a dozen kernels, TensorRT's context. Estimated, never measured.
CAPTURED_LAYER_BYTES = 32 << 10


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine takes once it is loaded and every slot is full."""

    place: Place
    weights_bytes: int
    kv_bytes_per_slot: int  # both networks, at full length; of a hybrid with its states and their snapshots
    slots: int
    buffers_bytes: int  # logits, tapped states, results: what a pass reads and writes beside its cache
    workspace_bytes: int  # inside passes, and captured ones; an estimate, TensorRT knows more once it has built

    @property
    def kv_bytes_all_slots(self) -> int:
        return self.kv_bytes_per_slot * self.slots

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes_all_slots + self.buffers_bytes + self.workspace_bytes

    def to_dict(self) -> dict[str, Any]:
        sums = {"kv_bytes_all_slots": self.kv_bytes_all_slots, "total_bytes": self.total_bytes}
        return {**dataclasses.asdict(self), **sums}


def plan_engine(
    name: BackendName,
    precision: str,
    target: TransformerDims,
    drafter: TransformerDims,
    limits: Limits,
    weights_bytes: int,
    *,
    native: bool = False,
) -> MemoryPlan:
    """The plan of an engine, built or not. `native`: TensorRT's own attention instead of our plugin.

    `weights_bytes` are those of both networks' files, what they share counted once; of plans without the heads. The
    plan has them as they are once loaded.
    """
    backend = BACKENDS[name]
    native = native or backend.attentions == ("native",)
    engine = _Engine(backend, precision, target, drafter, limits, native)
    per_row = sum(2 * len(d.attention_layers) * d.num_kv_heads * d.head_dim for d in (target, drafter))
    return MemoryPlan(
        place=backend.place,
        weights_bytes=engine.weights_bytes(weights_bytes),
        kv_bytes_per_slot=per_row * limits.cache_rows * PRECISIONS[precision].cache_bytes
        + target.state_bytes * (1 + limits.snapshots),
        slots=limits.max_batch,
        buffers_bytes=engine.buffers_bytes(),
        workspace_bytes=engine.workspace_bytes(),
    )


def _table_values(table: str, *networks: TransformerDims) -> list[int]:
    """The number of values in that table of each of the networks that has its own."""
    return [math.prod(own.shape) for dims in networks for own in kind_of(dims).own_tables if own.name == table]


# Files of weights in engine directories, of every backend.
_WEIGHT_FILES = (
    artifact.WEIGHTS,
    artifact.TORCH_WEIGHTS,
    artifact.TARGET_PLAN,
    artifact.DRAFTER_PLAN,
    artifact.COMPACTION_PLAN,
    artifact.SHARED_WEIGHTS,
)


def plan_manifest(manifest: Manifest) -> MemoryPlan:
    m = manifest
    weights = sum(m.files[name].size for name in _WEIGHT_FILES if name in m.files)
    if artifact.SHARED_WEIGHTS in m.files:
        tables = sum(_table_values(EMBEDDING, m.target_dims, m.drafter_dims))
        weights += tables * PRECISIONS[m.precision].value_bytes - m.files[artifact.SHARED_WEIGHTS].size
    native = m.attention == "native"
    return plan_engine(m.backend, m.precision, m.target_dims, m.drafter_dims, m.limits, weights, native=native)


def attention_workspace_bytes(networks: Iterable[TransformerDims], limits: Limits) -> int:
    """Scratch of the attention kernels for any pass of these networks: one piece serves all layers and passes, which
    follow each other. The TensorRT plugin asks for the same."""
    from ddtree_trt import _native  # here, so that `doctor` can say that it is not built

    most = 0
    for dims in networks:
        if dims.head_dim not in HEAD_DIMS:
            continue
        tokens = limits.max_tokens_per_pass
        if block := kind_of(dims).block_size:  # in TensorRT it follows the context's rows
            tokens = max(limits.prefill_chunk, block) + block
        heads = (dims.num_heads, dims.num_kv_heads, dims.head_dim)
        tokens = min(tokens, limits.cache_rows)
        most = max(most, _native.attention_workspace_bound(limits.max_batch, tokens, *heads, limits.cache_rows))
    return most


@dataclass(frozen=True)
class _Engine:
    """What a plan is computed from."""

    backend: Backend
    precision: str
    target: TransformerDims
    drafter: TransformerDims
    limits: Limits
    native: bool  # TensorRT's own attention

    @property
    def size(self) -> int:
        return PRECISIONS[self.precision].value_bytes

    @property
    def rows(self) -> int:
        """Most rows of one target pass, which verifies all slots of a round; on a CPU one may read a prompt beside."""
        limits = self.limits
        beside = (limits.max_batch - 1) * (1 + limits.max_tree_budget) + limits.prefill_chunk
        return max(pass_rows(limits, limits.max_batch), beside if self.backend.on_cpu else 0)

    def weights_bytes(self, stored: int) -> int:
        """Of the weights once they are loaded.

        ONNX Runtime's sessions each pack the float32 weights that they multiply by into memory of their own, and the
        file's pages are given back: so there is a head per session, also where both have the same one, and besides it
        an embedding, whose pages the sessions share, as they do all of 8-bit weights.
        """
        networks = (self.target, self.drafter)
        heads = _table_values(HEAD, *networks)
        if self.backend.plans:  # heads in float32 on the device
            return stored + sum(heads) * FLOAT_BYTES
        if not self.backend.on_cpu or PRECISIONS[self.precision].quantized:
            return stored
        again = 0 if len(heads) > 1 else heads[0]  # of the target's head in the drafter's session
        tables = {name for d in networks for table in kind_of(d).own_tables for name in table.sources}
        shapes = (item for d in networks for item in checkpoint_shapes(d, tied=True).items())
        layers = sum(math.prod(shape) for name, shape in shapes if name not in tables)
        return FLOAT_BYTES * (layers + sum(_table_values(EMBEDDING, *networks)) + sum(heads) + again)

    def buffers_bytes(self) -> int:
        if self.backend.plans:
            sizes = tensorrt_buffers(self.target, self.drafter, self.limits, self.size)
            return sum(sizes[name] for name in sizes.keys() - NOT_COUNTED_AS_BUFFERS)
        kind, limits = kind_of(self.drafter), self.limits
        taps = len(kind.tap_layers) * self.target.hidden_size
        waiting = limits.max_batch * limits.prefill_chunk if kind.shifted_inputs else 0  # states without a row of cache
        if kind.block_size and not self.backend.on_cpu:
            waiting = limits.max_batch * kind.block_size
        moves = self.target.delta.moved_values * len(self.target.delta_layers) if self.target.delta else 0
        of_a_row = self.target.vocab_size + moves
        return self.rows * of_a_row * FLOAT_BYTES + (self.rows + waiting) * taps * self.size

    def workspace_bytes(self) -> int:
        """About those of a pass: its widest arrays, and on a GPU the attention kernels' scratch and captured passes."""
        wide = self.widest_bytes()
        if self.backend.on_cpu:
            return 2 * wide  # memory is taken in powers of two and kept
        # The kernels compute in halves only. What attention of TensorRT's own asks for is known when it is built; about
        # as much is assumed.
        scratch = attention_workspace_bytes((self.target, self.drafter), self.limits) if self.size == 2 else 0
        # PyTorch keeps the memory of captured passes, which they share, apart from that of other passes.
        return (2 if self.backend.kernels else 1) * wide + scratch + self.captured_bytes()

    def captured_bytes(self) -> int:
        """About those of captured passes, the memory they work in aside: of TensorRT all that are kept at a time, of
        PyTorch those of rounds on the device, and of a single sequence's by stages. More are captured as more sequences
        are decoded together by stages."""
        kind, largest, depth = kind_of(self.drafter), 1 + self.limits.max_tree_budget, self.target.num_layers
        if self.backend.kernels:
            verifications = drafts = len(tree_sizes(largest))
            if kind.drafts == "block" and kind.pairs is None and self.target.delta is None:
                shapes = RoundShapes.of(self.limits, kind.longest_draft, self.drafter.vocab_size)
                verifications += len(shapes.verifications())
                drafts += len(shapes.drafts())
            return (verifications * depth + drafts * self.drafter.num_layers) * CAPTURED_LAYER_BYTES
        trees, block, slots = len(buckets(largest)), kind.block_size, self.limits.max_batch
        steps = len(context_steps(block)) if block else 1  # an autoregressive drafter's passes are of one token
        drafts = captured_passes(steps, slots, neighbours=self.native)
        verifications = captured_passes(trees, slots, neighbours=self.native)
        return (verifications * depth + drafts * self.drafter.num_layers) * CAPTURED_LAYER_BYTES

    def widest_bytes(self) -> int:
        """Of the widest arrays: the fused projections of the target's rows, or the drafter's logits."""
        target, kind = self.target, kind_of(self.drafter)
        wide = self.rows * self.size * (4 * target.hidden_size + 3 * target.widest)
        drafted = self.limits.max_batch * (kind.longest_draft if kind.block_size else 0)
        return max(wide + self.delta_bytes(), 2 * drafted * target.vocab_size * FLOAT_BYTES)

    def delta_bytes(self) -> int:
        """Of the matrices [N, Hv, T, T] of a hybrid's layer on a GPU: about six of float32 at a time."""
        net, limits = self.target.delta, self.limits
        if net is None or self.backend.on_cpu:
            return 0
        pairs = max(limits.max_batch * (1 + limits.max_tree_budget) ** 2, limits.prefill_chunk**2)
        return 6 * FLOAT_BYTES * net.value_heads * pairs
