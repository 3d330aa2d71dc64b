"""Sizes of passes on a GPU, and the TensorRT engine's memory there: its buffers by name, their sizes and their places
in one block.

The engine allocates by this, and the memory plan counts by it. Letters as in `artifact`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.drafters import kind as kinds
from ddtree_trt.drafters.kind import DrafterKind
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import MAX_DEVICE_BUDGET


def buckets(largest: int) -> list[int]:
    """Numbers of tree tokens a graph is made for, rising to `largest`: a pass takes the next one up. Finer steps would
    save nothing, as matrix products work in tiles of 16 rows and more."""
    steps = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, largest, 128)]
    return [*(t for t in steps if t < largest), largest]


ROUND_ROWS = 512  # most rows N·T of a pass of rounds on the device, unless two slots' trees are larger


def round_rows(tokens: int) -> int:
    """Most rows of such a pass, where the largest trees have so many tokens."""
    return max(ROUND_ROWS, 2 * tokens)


CANDIDATES = (1, 16, 64, 256, 1024, 4096)  # K of captured drafts: one takes the next larger number
REACHES = (3, 7)  # positions of captured drafts, besides all of them: likewise


@dataclass(frozen=True)
class RoundShapes:
    """Sizes of passes of rounds on the device; a graph of each is captured when an engine is opened."""

    slots: tuple[int, ...]  # N, rising
    tokens: tuple[int, ...]  # T, rising
    longest_draft: int  # L
    head_size: int  # most candidates of a position

    @staticmethod
    def of(limits: Limits, longest_draft: int, head_size: int) -> RoundShapes:
        tokens = tree_sizes(1 + min(limits.max_tree_budget, MAX_DEVICE_BUDGET))
        return RoundShapes(slot_numbers(limits.max_batch), tokens, longest_draft, head_size)

    def most_slots(self, tokens: int) -> int:
        """Of a pass over trees of T tokens."""
        return max(n for n in self.slots if n == 1 or n * tokens <= round_rows(self.tokens[-1]))

    def candidates(self, tokens: int) -> int:
        """K of the drafts of trees of T tokens."""
        return 1 if tokens == 1 else min(next(k for k in CANDIDATES[1:] if k >= tokens - 1), self.head_size)

    def reach(self, nodes: int) -> int:
        """Positions that a draft for so many nodes computes; 0: it takes in what waits for the drafter, and no more."""
        longest = self.longest_draft
        return next((r for r in (0, *REACHES) if nodes <= r < longest), longest)

    def outlook(self, tokens: int) -> int:
        """Nodes O that are weighed beside a tree of T tokens, its own among them."""
        return min(2 * tokens, MAX_DEVICE_BUDGET) if tokens > 1 else 0

    def verifications(self) -> list[tuple[int, int]]:
        """(N, T) of every pass over trees."""
        return [(n, t) for t in self.tokens for n in self.slots if n <= self.most_slots(t)]

    def drafts(self) -> list[tuple[int, int, int]]:
        """(N, positions, K) of every draft."""
        found = dict.fromkeys((n, 0, 1) for n in self.slots)
        for smaller, tokens in pairwise(self.tokens):
            reaches = dict.fromkeys(self.reach(nodes) for nodes in range(smaller, 2 * tokens - 1))
            numbers = (n for n in self.slots if n <= self.most_slots(tokens))
            found |= dict.fromkeys(product(numbers, reaches, (self.candidates(tokens),)))
        return list(found)


def slot_numbers(slots: int) -> tuple[int, ...]:
    """Numbers of slots N that passes are padded to, rising to `slots`: powers of two and three times these."""
    powers = [1 << i for i in range(slots.bit_length())]
    return (*sorted(n for n in {*powers, *(3 * p for p in powers)} if n < slots), slots)


def tree_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of tree tokens T on the PyTorch engine, rising to `largest`."""
    return (*(1 << i for i in range((largest - 1).bit_length())), largest)


def context_steps(block: int) -> list[int]:
    """Numbers of context rows C that a block drafter's pass is captured for, rising to a block of `block` tokens."""
    return [*(c for c in (1, 2, 4, 8, 16, 32, 64) if c < block), block]


MOST_CAPTURED = 256  # passes of one network of a TensorRT engine; the one unused longest makes room for another


ALIGNMENT = 256  # bytes: what TensorRT asks of every tensor's address
INT_BYTES = FLOAT_BYTES = 4

# Names of the TensorRT engine's buffers.
EMBEDDING, HEAD = names.EMBEDDING, names.HEAD
TARGET_KV, DRAFTER_KV = "target_kv", "drafter_kv"
TARGET_STATES, KEPT = "target_states", "kept"  # of hybrids
LOGITS, TAPS, STATES, CONTEXT = "logits", "taps", "states", "context"
DRAFTER_EMBEDDING, DRAFTER_HEAD = names.DRAFTER + EMBEDDING, names.DRAFTER + HEAD  # of an autoregressive drafter
DRAFT_LOGITS = "draft_logits"  # likewise
TABLES = {kinds.EMBEDDING: EMBEDDING, kinds.HEAD: HEAD}  # the buffer of a network's own table
RESULTS = "results"
TARGET_CONTROL, DRAFTER_CONTROL, COMMIT_CONTROL = "target_control", "drafter_control", "commit_control"
WORKSPACE = "workspace"
# What a memory plan counts as weights, as cache or as workspace.
NOT_COUNTED_AS_BUFFERS = frozenset(
    (EMBEDDING, HEAD, DRAFTER_EMBEDDING, DRAFTER_HEAD, TARGET_KV, DRAFTER_KV, TARGET_STATES, WORKSPACE)
)


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Places of buffers that follow each other in one block of memory."""

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
    """A network's cache as one block [planes, stored slots, Hkv, S, D]; a plane is a layer's keys or values."""

    planes: int
    slots: int
    kv_heads: int
    rows: int  # S
    head_dim: int
    row_bytes: int  # D elements

    @staticmethod
    def of(dims: TransformerDims, limits: Limits, element_bytes: int) -> CacheShape:
        row_bytes = dims.head_dim * element_bytes
        planes, heads = 2 * len(dims.attention_layers), dims.num_kv_heads
        return CacheShape(planes, limits.max_batch, heads, limits.cache_rows, dims.head_dim, row_bytes)

    @property
    def slot_shape(self) -> tuple[int, int, int]:
        """[Hkv, S, D] of one slot in one plane."""
        return self.kv_heads, self.rows, self.head_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one plane."""
        return self.kv_heads * self.rows * self.row_bytes

    @property
    def stored_slots(self) -> int:
        """Slots of a plane in memory: `slots`, and unused ones that align the next plane to `ALIGNMENT`."""
        step = ALIGNMENT // math.gcd(ALIGNMENT, self.slot_bytes)
        return -(-self.slots // step) * step

    @property
    def plane_bytes(self) -> int:
        return self.stored_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.planes * self.plane_bytes


@dataclass(frozen=True)
class StateShapes:
    """What each delta-net layer of a hybrid keeps on a GPU, in float32."""

    layers: int
    state_bytes: int  # the state of one slot
    past_bytes: int  # the convolution's last inputs of one slot
    row_bytes: int  # what a commit needs of one row of the last pass

    @staticmethod
    def of(dims: TransformerDims) -> StateShapes:
        net, layers = dims.delta, len(dims.delta_layers)
        if net is None:
            return StateShapes(0, 0, 0, 0)
        past = (net.taps - 1) * net.channels
        values = net.state_values - past, past, sum(net.widths[1:]) + net.value_heads + net.channels
        return StateShapes(layers, *(FLOAT_BYTES * count for count in values))

    @property
    def slot_bytes(self) -> int:
        """Of one slot in all layers."""
        return self.layers * (self.state_bytes + self.past_bytes)


def with_aligned_slots(limits: Limits, networks: Iterable[TransformerDims], element_bytes: int) -> Limits:
    """The limits with a longer chunk where that takes every slot of these networks' caches to a multiple of
    `ALIGNMENT`: native attention binds a cache at the first slot of a pass."""
    if limits.max_batch == 1:
        return limits
    each = (dims.num_kv_heads * dims.head_dim * element_bytes for dims in networks)
    # Rows that a capacity must be a multiple of: powers of two, so the largest is a multiple of all.
    step = max(ALIGNMENT // math.gcd(ALIGNMENT, size) for size in each)
    missing = -limits.cache_rows % step
    return replace(limits, prefill_chunk=limits.max_tokens_per_pass + missing) if missing else limits


def pass_rows(limits: Limits, slots: int) -> int:
    """Most rows of one target pass over that many slots: their trees, or one chunk of a prompt."""
    return max(slots * (1 + limits.max_tree_budget), limits.prefill_chunk)


def logit_rows(limits: Limits) -> int:
    """Rows whose logits a PyTorch engine holds: of a pass by stages with more they are computed part by part."""
    tree = 1 + limits.max_tree_budget
    return min(round_rows(tree), limits.max_batch * tree)


@dataclass(frozen=True)
class Rows:
    """How many rows of tapped states the buffers of the TensorRT engine hold for a drafter."""

    waiting: int  # per slot: tapped states kept for the drafter, with those it may be given again
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
    """Bytes of every buffer of a TensorRT engine on the device, weights inside the plans aside. `candidates` is K of a
    block drafter; None takes the most there can be. Heads are in float32, tied or not."""
    slots = limits.max_batch
    rows = pass_rows(limits, slots)
    own, results = _drafter_buffers(target, drafter, limits, element_bytes, candidates)
    states = {}  # of a hybrid, with those that slots come back to, and what passes keep
    if target.delta is not None:
        shapes = StateShapes.of(target)
        live = shapes.layers * sum(aligned(slots * size) for size in (shapes.state_bytes, shapes.past_bytes))
        states[TARGET_STATES] = live + slots * limits.snapshots * shapes.slot_bytes
        states[KEPT] = shapes.layers * aligned(rows * shapes.row_bytes)
    return {
        **_table_bytes(target, "", element_bytes),
        TARGET_KV: CacheShape.of(target, limits, element_bytes).total_bytes,
        DRAFTER_KV: CacheShape.of(drafter, limits, element_bytes).total_bytes,
        **states,
        LOGITS: rows * target.vocab_size * FLOAT_BYTES,
        RESULTS: max(rows * INT_BYTES, results),
        TARGET_CONTROL: _pass_control_bytes(slots, rows, limits) + (_control_bytes(rows) if target.delta else 0),
        COMMIT_CONTROL: slots * _control_bytes(*4 * [1], *(2 if target.delta else 1) * [limits.max_tokens_per_pass]),
        **own,
        WORKSPACE: workspace_bytes,
    }


def _table_bytes(dims: TransformerDims, prefix: str, element_bytes: int) -> dict[str, int]:
    """Bytes of a network's own embedding and head, as far as it has them."""
    sizes = {kinds.EMBEDDING: element_bytes, kinds.HEAD: FLOAT_BYTES}
    return {prefix + TABLES[t.name]: math.prod(t.shape) * sizes[t.name] for t in kind_of(dims).own_tables}


def _drafter_buffers(
    target: TransformerDims, drafter: TransformerDims, limits: Limits, element_bytes: int, candidates: int | None
) -> tuple[dict[str, int], int]:
    """(bytes of each buffer of a drafter of this kind, its cache aside; bytes of its results)."""
    kind, slots = kind_of(drafter), limits.max_batch
    block = kind.block_size or 1
    rows = Rows.of(block, limits)
    buffers = _table_bytes(drafter, names.DRAFTER, element_bytes)
    if kind.tap_layers:
        width = len(kind.tap_layers) * target.hidden_size * element_bytes
        buffers |= {
            TAPS: pass_rows(limits, slots) * width,
            STATES: slots * rows.waiting * width,
            CONTEXT: rows.context * width,
        }
    if kind.block_size is None:
        buffers[DRAFT_LOGITS] = slots * drafter.vocab_size * FLOAT_BYTES
        buffers[DRAFTER_CONTROL] = _pass_control_bytes(slots, slots * limits.prefill_chunk, limits)
        return buffers, 0
    positions = max(slots * 2 * block, rows.chunk + block)
    buffers[DRAFTER_CONTROL] = _control_bytes(slots, slots, slots * block, positions)
    k = candidates or min(max(limits.max_tree_budget, 1), target.vocab_size)
    return buffers, draft_results(kind, slots, k).total_bytes


def draft_results(kind: DrafterKind, slots: int, candidates: int) -> Layout:
    """Places of the results of a block drafter's pass, by output; `candidates` is K where no head for pairs is."""
    head = kind.pairs
    values = slots * kind.longest_draft * (candidates if head is None else head.candidates)
    ids = {names.CANDIDATES: values * INT_BYTES}
    if head is None:
        return Layout.of({names.LOG_PROBS: values * FLOAT_BYTES, **ids})
    factors = values * head.rank * FLOAT_BYTES
    return Layout.of({names.UNARY: values * FLOAT_BYTES, **ids, names.LEFT: factors, names.RIGHT: factors})


def _pass_control_bytes(slots: int, rows: int, limits: Limits) -> int:
    """Bytes of the control data of a pass over trees, with at most `rows` rows in all."""
    return _control_bytes(slots, slots, rows, rows, rows * -(-limits.max_tokens_per_pass // 32), rows)


def _control_bytes(*values: int) -> int:
    """Bytes of int32 arrays of these lengths, each aligned."""
    return sum(aligned(n * INT_BYTES) for n in values)
