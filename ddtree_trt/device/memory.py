"""The memory an engine takes, computed before anything is allocated and without CUDA. Letters as in `artifact`."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import BACKENDS, Backend, BackendName, Place
from ddtree_trt.artifact.manifest import Limits, Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.device.buffers import FLOAT_BYTES, NOT_COUNTED_AS_BUFFERS, logit_rows, pass_rows, tensorrt_buffers
from ddtree_trt.drafters.kind import EMBEDDING, HEAD
from ddtree_trt.drafters.registry import checkpoint_shapes, kind_of
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import HEAD_DIMS


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine takes once it is loaded and every slot is full."""

    place: Place
    weights_bytes: int
    kv_bytes_per_slot: int  # both networks, at full length; of a hybrid with its states and their snapshots
    slots: int
    buffers_bytes: int  # logits, tapped states, results: what a pass reads and writes beside its cache
    workspace_bytes: int  # inside passes; an estimate, TensorRT knows more once it has built

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
) -> MemoryPlan:
    """The plan of an engine, built or not. `weights_bytes` are those of both networks' files, what they share counted
    once; of plans without the heads."""
    backend, networks, size = BACKENDS[name], (target, drafter), PRECISIONS[precision].value_bytes
    slots, tree, kind = limits.max_batch, 1 + limits.max_tree_budget, kind_of(drafter)
    # Of a target pass, which verifies all slots of a round; on a CPU one may read a prompt beside.
    rows = pass_rows(limits, slots)
    rows = max(rows, (slots - 1) * tree + limits.prefill_chunk) if backend.on_cpu else rows

    if backend.plans:
        sizes = tensorrt_buffers(target, drafter, limits, size)
        buffers = sum(sizes[name] for name in sizes.keys() - NOT_COUNTED_AS_BUFFERS)
    else:
        waiting = limits.prefill_chunk if kind.shifted_inputs else 0  # states of a slot without a row of cache
        waiting = kind.block_size if kind.block_size and not backend.on_cpu else waiting
        moves = target.delta.moved_values * len(target.delta_layers) if target.delta else 0
        taps = len(kind.tap_layers) * target.hidden_size
        held = logit_rows(limits) if backend.kernels else rows
        kept = slots * tree * target.hidden_size if slots * tree > held and backend.kernels else 0
        buffers = (held * target.vocab_size + rows * moves) * FLOAT_BYTES + (rows + slots * waiting) * taps * size
        buffers += kept * size  # of which logits that are not held are computed again

    # The widest arrays of a pass: the fused projections of the target's rows, or the drafter's logits. On a GPU also
    # the matrices [N, Hv, T, T] of a hybrid's layer, about six of float32 at a time.
    wide = rows * size * (4 * target.hidden_size + 3 * target.widest)
    if target.delta and not backend.on_cpu:
        wide += 6 * FLOAT_BYTES * target.delta.value_heads * max(slots * tree**2, limits.prefill_chunk**2)
    drafted = slots * (kind.longest_draft if kind.block_size else 0)
    wide = max(wide, 2 * drafted * target.vocab_size * FLOAT_BYTES)
    if backend.on_cpu:
        workspace = 2 * wide  # memory is taken in powers of two and kept
    else:
        # The kernels compute in halves only. What attention of TensorRT's own asks for is known when it is built; about
        # as much is assumed. PyTorch keeps the memory of captured passes, which they share, apart from that of others.
        scratch = attention_workspace_bytes(networks, limits) if size == 2 else 0
        workspace = (2 if backend.kernels else 1) * wide + scratch

    cached = sum(2 * len(d.attention_layers) * d.num_kv_heads * d.head_dim for d in networks)  # values of a row
    return MemoryPlan(
        place=backend.place,
        weights_bytes=_loaded_bytes(backend, precision, networks, weights_bytes),
        kv_bytes_per_slot=cached * limits.cache_rows * PRECISIONS[precision].cache_bytes
        + target.state_bytes * (1 + limits.snapshots),
        slots=slots,
        buffers_bytes=buffers,
        workspace_bytes=workspace,
    )


def _loaded_bytes(backend: Backend, precision: str, networks: Sequence[TransformerDims], stored: int) -> int:
    """Of weights once they are loaded. ONNX Runtime's sessions each pack the float32 weights that they multiply by into
    memory of their own, so that there is a head per session; they share the embedding, and all of 8-bit weights."""
    heads = _table_values(HEAD, *networks)
    if backend.plans:  # heads in float32 on the device
        return stored + sum(heads) * FLOAT_BYTES
    if not backend.on_cpu or PRECISIONS[precision].quantized:
        return stored
    again = 0 if len(heads) > 1 else heads[0]  # of the target's head in the drafter's session
    tables = {name for d in networks for table in kind_of(d).own_tables for name in table.sources}
    shapes = (item for d in networks for item in checkpoint_shapes(d, tied=True).items())
    layers = sum(math.prod(shape) for name, shape in shapes if name not in tables)
    return FLOAT_BYTES * (layers + sum(_table_values(EMBEDDING, *networks)) + sum(heads) + again)


def _table_values(table: str, *networks: TransformerDims) -> list[int]:
    """The number of values in that table of each of the networks that has its own."""
    return [math.prod(own.shape) for dims in networks for own in kind_of(dims).own_tables if own.name == table]


def plan_manifest(manifest: Manifest) -> MemoryPlan:
    m = manifest
    graphs = (artifact.TARGET_GRAPH, artifact.DRAFTER_GRAPH)  # whose weights are in a file of their own
    weights = sum(m.files[name].size for name in BACKENDS[m.backend].files if name in m.files and name not in graphs)
    if artifact.SHARED_WEIGHTS in m.files:
        tables = sum(_table_values(EMBEDDING, m.target_dims, m.drafter_dims))
        weights += tables * PRECISIONS[m.precision].value_bytes - m.files[artifact.SHARED_WEIGHTS].size
    return plan_engine(m.backend, m.precision, m.target_dims, m.drafter_dims, m.limits, weights)


def attention_workspace_bytes(networks: Iterable[TransformerDims], limits: Limits) -> int:
    """Scratch of the attention kernels, and of the plugin, for any pass of these networks."""
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
