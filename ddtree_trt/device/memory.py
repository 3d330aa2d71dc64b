"""What an engine takes in memory, computed before anything is allocated and without CUDA.

`plan_engine` is what `inspect` and `build --dry-run` print. `tensorrt_buffers` is also what the TensorRT engine
allocates by: one block, every buffer at a multiple of 256 bytes. Letters as in `artifact`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.artifact import manifest as artifact
from ddtree_trt.artifact.manifest import Limits, Manifest, TransformerDims
from ddtree_trt.device.buckets import buckets
from ddtree_trt.models.drafters.kinds import kind_of
from ddtree_trt.plugins import HEAD_DIMS

ALIGNMENT = 256  # bytes: what TensorRT asks of every tensor's address
# Of what is no weight, by precision: int8 rounds weights, and rows while they are multiplied.
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 4}
INT_BYTES = FLOAT_BYTES = 4
# Of a layer in a captured pass: a dozen kernels' nodes and arguments, TensorRT's context. Estimated, never measured.
CAPTURED_LAYER_BYTES = 32 << 10

# Names of the TensorRT engine's buffers.
EMBEDDING, HEAD = "embedding", "head"
TARGET_KV, DRAFTER_KV = "target_kv", "drafter_kv"
LOGITS, TAPS, STATES, CONTEXT = "logits", "taps", "states", "context"
DRAFTER_EMBEDDING, DRAFTER_HEAD, DRAFT_LOGITS = "drafter_embedding", "drafter_head", "draft_logits"  # autoregressive
RESULTS = "results"
TARGET_CONTROL, DRAFTER_CONTROL, COMMIT_CONTROL = "target_control", "drafter_control", "commit_control"
WORKSPACE = "workspace"
# What a plan counts as weights, as cache or as workspace; the rest are its buffers.
_ELSEWHERE = frozenset((EMBEDDING, HEAD, DRAFTER_EMBEDDING, DRAFTER_HEAD, TARGET_KV, DRAFTER_KV, WORKSPACE))

Backend = Literal["onnxruntime", "torch", "tensorrt"]
Place = Literal["host", "GPU", "device"]  # the last is a GPU where there is one, else the host
_PLACES: Mapping[Backend, Place] = {"onnxruntime": "host", "torch": "device", "tensorrt": "GPU"}


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Buffers one behind the other in one block of memory."""

    offsets: Mapping[str, int]  # name → byte offset
    sizes: Mapping[str, int]  # name → bytes, as asked for
    total_bytes: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> Layout:
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += aligned(size)
        return Layout(offsets, dict(sizes), end)


@dataclass(frozen=True)
class CacheShape:
    """One network's key-value cache as one block [planes, stored slots, Hkv, S, D]; a plane is the keys or the values
    of one layer."""

    planes: int
    slots: int
    kv_heads: int
    rows: int  # S
    row_bytes: int  # D elements

    @staticmethod
    def of(dims: TransformerDims, limits: Limits, element_bytes: int) -> CacheShape:
        row_bytes = dims.head_dim * element_bytes
        return CacheShape(2 * dims.num_layers, limits.max_batch, dims.num_kv_heads, limits.cache_rows, row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Of one slot in one plane."""
        return self.kv_heads * self.rows * self.row_bytes

    @property
    def stored_slots(self) -> int:
        """Slots and what it takes behind them for the next plane to begin at a multiple of `ALIGNMENT`."""
        step = ALIGNMENT // math.gcd(ALIGNMENT, self.slot_bytes)
        return -(-self.slots // step) * step

    @property
    def plane_bytes(self) -> int:
        return self.stored_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.planes * self.plane_bytes


def target_rows(limits: Limits) -> int:
    """Most rows of one target pass over all slots: T padded, or one chunk."""
    return max(limits.max_batch * (1 + limits.max_tree_budget), limits.prefill_chunk)


@dataclass(frozen=True)
class Rows:
    """How many rows of tapped states the buffers of the TensorRT engine hold for a drafter."""

    waiting: int  # per slot: tapped states the drafter may be given again
    context: int  # of one drafter pass over all slots
    chunk: int  # most context rows of one slot in one drafter pass

    @staticmethod
    def of(block: int, limits: Limits) -> Rows:
        """For a drafter whose block has `block` tokens."""
        chunk = max(limits.prefill_chunk, block)
        return Rows(waiting=chunk + block, context=max(limits.max_batch * block, chunk), chunk=chunk)


def tensorrt_buffers(
    target: TransformerDims,
    drafter: TransformerDims,
    limits: Limits,
    element_bytes: int,
    *,
    candidates: int | None = None,
    workspace_bytes: int = 0,
) -> dict[str, int]:
    """Bytes of every buffer of a TensorRT engine on the device, weights inside the plans aside.

    `candidates` is K of a block drafter; None takes the most there can be. Heads are in float32, tied or not; a drafter
    has tables where its kind has its own.
    """
    rows, slots = target_rows(limits), limits.max_batch
    own, results = _drafter_buffers(target, drafter, limits, element_bytes, candidates)
    return {
        **_tables(target, EMBEDDING, HEAD, element_bytes),
        TARGET_KV: CacheShape.of(target, limits, element_bytes).total_bytes,
        DRAFTER_KV: CacheShape.of(drafter, limits, element_bytes).total_bytes,
        LOGITS: rows * target.vocab_size * FLOAT_BYTES,
        RESULTS: max(rows * INT_BYTES, results),
        TARGET_CONTROL: _pass_control_bytes(slots, rows, limits),
        COMMIT_CONTROL: slots * _control_bytes(1, 1, 1, 1, limits.max_tokens_per_pass),
        **own,
        WORKSPACE: workspace_bytes,
    }


def _tables(dims: TransformerDims, embedding: str, head: str, element_bytes: int) -> dict[str, int]:
    """A network's embedding and head [V, H], under these names."""
    values = dims.vocab_size * dims.hidden_size
    return {embedding: values * element_bytes, head: values * FLOAT_BYTES}


def _drafter_buffers(
    target: TransformerDims, drafter: TransformerDims, limits: Limits, element_bytes: int, candidates: int | None
) -> tuple[dict[str, int], int]:
    """What a drafter of this kind has beside its cache, and how many bytes its results take."""
    kind, slots = kind_of(drafter), limits.max_batch
    block = kind.block_size or 1
    rows = Rows.of(block, limits)
    buffers = _tables(drafter, DRAFTER_EMBEDDING, DRAFTER_HEAD, element_bytes) if kind.own_tables else {}
    if kind.tap_layers:
        width = len(kind.tap_layers) * target.hidden_size * element_bytes
        buffers |= {
            TAPS: target_rows(limits) * width,
            STATES: slots * rows.waiting * width,
            CONTEXT: rows.context * width,
        }
    if not kind.at_once:
        buffers[DRAFT_LOGITS] = drafter.vocab_size * FLOAT_BYTES
        buffers[DRAFTER_CONTROL] = _pass_control_bytes(1, limits.prefill_chunk, limits)
        return buffers, 0
    positions = max(slots * 2 * block, rows.chunk + block)
    buffers[DRAFTER_CONTROL] = _control_bytes(slots, slots, slots * block, positions)
    k = candidates or min(max(limits.max_tree_budget, 1), target.vocab_size)
    drafts = slots * (block - 1) * k
    return buffers, aligned(drafts * FLOAT_BYTES) + drafts * INT_BYTES


def _pass_control_bytes(slots: int, rows: int, limits: Limits) -> int:
    """Of a pass over trees, with at most `rows` rows in all."""
    return _control_bytes(slots, slots, rows, rows, rows * -(-limits.max_tokens_per_pass // 32), rows)


def _control_bytes(*values: int) -> int:
    """Of int32 control data, each array aligned."""
    return sum(aligned(n * INT_BYTES) for n in values)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine takes once it is loaded and every slot is full."""

    place: Place
    weights_bytes: int
    kv_bytes_per_slot: int  # both networks, at full length
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
        """Every figure as plain JSON data."""
        sums = {"kv_bytes_all_slots": self.kv_bytes_all_slots, "total_bytes": self.total_bytes}
        return {**dataclasses.asdict(self), **sums}


def plan_engine(
    backend: Backend,
    precision: str,
    target: TransformerDims,
    drafter: TransformerDims,
    limits: Limits,
    weights_bytes: int,
) -> MemoryPlan:
    """`weights_bytes` of both networks, what they share counted once; for TensorRT without the heads, which are added
    as they are on the device, in float32."""
    size = ELEMENT_BYTES[precision]
    if backend == "tensorrt":
        weights_bytes += sum(d.vocab_size * d.hidden_size for d in _with_tables(target, drafter)) * FLOAT_BYTES
    per_row = sum(2 * d.num_layers * d.num_kv_heads * d.head_dim * size for d in (target, drafter))
    return MemoryPlan(
        place=_PLACES[backend],
        weights_bytes=weights_bytes,
        kv_bytes_per_slot=per_row * limits.cache_rows,
        slots=limits.max_batch,
        buffers_bytes=_buffers_bytes(backend, size, target, drafter, limits),
        workspace_bytes=_workspace_bytes(backend, size, target, drafter, limits),
    )


def _with_tables(target: TransformerDims, drafter: TransformerDims) -> tuple[TransformerDims, ...]:
    """The networks that have an embedding and a head of their own."""
    return (target, drafter) if kind_of(drafter).own_tables else (target,)


# What is loaded of an engine directory, whatever its backend.
_WEIGHT_FILES = (
    artifact.WEIGHTS,
    artifact.TORCH_WEIGHTS,
    artifact.TARGET_PLAN,
    artifact.DRAFTER_PLAN,
    artifact.SHARED_WEIGHTS,
)


def plan_manifest(manifest: Manifest) -> MemoryPlan:
    """The plan of an engine that was built."""
    m = manifest
    weights = sum(m.files[name].size for name in _WEIGHT_FILES if name in m.files)
    if artifact.SHARED_WEIGHTS in m.files:
        tables = sum(d.vocab_size * d.hidden_size for d in _with_tables(m.target_dims, m.drafter_dims))
        weights += tables * ELEMENT_BYTES[m.precision] - m.files[artifact.SHARED_WEIGHTS].size
    return plan_engine(m.backend, m.precision, m.target_dims, m.drafter_dims, m.limits, weights)


def _buffers_bytes(
    backend: Backend, size: int, target: TransformerDims, drafter: TransformerDims, limits: Limits
) -> int:
    if backend == "tensorrt":
        buffers = tensorrt_buffers(target, drafter, limits, size)
        return sum(buffers[name] for name in buffers.keys() - _ELSEWHERE)
    # One slot after the other on a CPU, all slots of a round in one pass on a GPU.
    slots = 1 if backend == "onnxruntime" else limits.max_batch
    rows = max(slots * (1 + limits.max_tree_budget), limits.prefill_chunk)
    taps = len(kind_of(drafter).tap_layers) * target.hidden_size
    return rows * (target.vocab_size * FLOAT_BYTES + taps * size)


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


def _workspace_bytes(
    backend: Backend, size: int, target: TransformerDims, drafter: TransformerDims, limits: Limits
) -> int:
    """About what a pass holds: its widest arrays, and on a GPU the attention kernels' scratch and captured passes."""
    wide = _widest_bytes(backend, size, target, drafter, limits)
    if backend == "onnxruntime":
        return wide
    # The kernels compute in halves only.
    scratch = attention_workspace_bytes((target, drafter), limits) if size == 2 else 0
    # PyTorch keeps what is inside captured passes, which share it, apart from what is inside the others.
    return (2 if backend == "torch" else 1) * wide + scratch + _captured_bytes(target, drafter, limits)


def _captured_bytes(target: TransformerDims, drafter: TransformerDims, limits: Limits) -> int:
    """About what the passes captured for a single sequence take beside the memory they work in. More are captured as
    more sequences are decoded together."""
    trees = len(buckets(1 + limits.max_tree_budget))
    return trees * (target.num_layers + drafter.num_layers) * CAPTURED_LAYER_BYTES


def _widest_bytes(
    backend: Backend, size: int, target: TransformerDims, drafter: TransformerDims, limits: Limits
) -> int:
    """The fused projections of the target's rows, or the drafter's logits."""
    slots = 1 if backend == "onnxruntime" else limits.max_batch
    rows = max(slots * (1 + limits.max_tree_budget), limits.prefill_chunk)
    heads = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    wide = rows * size * (4 * target.hidden_size + 3 * max(target.intermediate_size, heads))
    block = kind_of(drafter).block_size or 1
    return max(wide, 2 * slots * (block - 1) * target.vocab_size * FLOAT_BYTES)
