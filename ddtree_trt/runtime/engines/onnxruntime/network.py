"""A network in ONNX Runtime: its session, whose passes take rows of several slots, and the cache of all slots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits, Manifest, cpu_cache_bytes, cpu_cache_rows
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.base import Verdict, VerifyRequest
from ddtree_trt.runtime.engines.passes import SlotLengths, Snapshots


def session_options(threads: int) -> ort.SessionOptions:
    """Session options for this processor; 0 threads means one per core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # planned per set of input shapes, and passes differ in their rows
    options.register_custom_ops_library(_native.__file__)
    # Target and drafter have separate threads: those of one would spin on the cores that the other computes on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


class _Buffers:
    """Memory of the passes' inputs and outputs: it grows to the largest shape asked for and is reused."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}
        self._views: dict[str, NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        """The same array as in the last call while the shape is the same, so that its binding stays valid."""
        view = self._views.get(name)
        if view is not None and view.shape == shape:
            return view
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, dtype)
        view = self._views[name] = memory[:size].reshape(shape)
        return view


@dataclass(frozen=True)
class SlotRows:
    """A slot's rows of a pass, behind its committed ones."""

    slot: int
    nodes: int
    contexts: int = 0  # rows of keys alone, before the nodes
    done: int = 0  # nodes before these whose rows the cache has


class States:
    """The states of a hybrid's delta nets, of all layers and slots, and those that slots keep to come back to."""

    def __init__(self, dims: TransformerDims, limits: Limits) -> None:
        assert dims.delta is not None, "a network of attention alone has no states"
        d, layers = dims.delta, len(dims.delta_layers)
        self._shape = (d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.taps)
        self.values = np.zeros((layers, limits.max_batch, d.state_values), np.float32)  # as `DDTreeDeltaNet` reads them
        self.moves = np.empty((layers, 0, d.moved_values), np.float32)  # of the last pass
        self.snapshots = Snapshots[NDArray[np.float32]](limits.max_batch, limits.snapshot_every)

    def commit(self, slot: int, rows: NDArray[np.int32], length: int, *, prompt_ends: bool) -> None:
        """Move a slot of that length along rows [m] of the last pass. `prompt_ends`: with the last of them."""
        for stop in self.snapshots.stops(slot, length, length + len(rows), prompt_ends=prompt_ends):
            self._move(slot, rows[: stop - length])
            rows, length = rows[stop - length :], stop
            self.snapshots.keep(slot, stop, self.values[:, slot].copy())
        self._move(slot, rows)

    def _move(self, slot: int, rows: NDArray[np.int32]) -> None:
        _native.commit_delta(self.values, self.moves, slot, np.ascontiguousarray(rows), *self._shape)

    def restore(self, slot: int, length: int) -> None:
        """Go back to a kept state, or to 0, and forget later ones."""
        state = self.snapshots.back_to(slot, length)
        self.values[:, slot] = 0 if state is None else state


class OrtCache(SlotLengths):
    """One network's cache: keys and values of all slots and layers with attention, as `DDTreeAttention` stores them,
    and states of the others. The buffers never move: passes append in place, commits move rows in place."""

    states: States | None

    def __init__(self, dims: TransformerDims, manifest: Manifest) -> None:
        limits, precision = manifest.limits, manifest.precision
        states = States(dims, limits) if dims.delta_layers else None
        super().__init__(limits.max_batch, limits.cache_rows, states)
        self._shape = (dims.head_dim, cpu_cache_rows(limits), PRECISIONS[precision].cache_bytes == 2)
        # np.zeros maps pages lazily: a slot costs memory only once tokens are written to it.
        head_bytes = cpu_cache_bytes(dims.head_dim, limits, precision)
        layers = len(dims.attention_layers)
        self.buffer = np.zeros((layers, limits.max_batch, dims.num_kv_heads, head_bytes), np.uint8)
        self.first_rows: dict[int, int] = {}  # of the slots in the last pass

    def compact(self, slot: int, path: NDArray[np.int32], *, prompt_ends: bool = False) -> None:
        """Move the rows length + path[j] to length + j in every layer with attention, and the others' states along
        them; then count them as committed. `prompt_ends`: the last of them is a prompt's last token."""
        if path[-1] != len(path) - 1:
            _native.compact_cache(self.buffer, slot, *self._shape, self.lengths[slot], path)
        if self.states is not None:
            rows = path + np.int32(self.first_rows[slot])
            self.states.commit(slot, rows, self.lengths[slot], prompt_ends=prompt_ends)
        self.append(slot, len(path))


_NONE: NDArray[np.int32] = np.empty(0, np.int32)


class OrtNetwork:
    """A session and the cache of its slots."""

    def __init__(
        self, path: Path, dims: TransformerDims, manifest: Manifest, threads: int, *, widths: Mapping[str, int]
    ) -> None:
        """`dims`: of this network. `widths`: length of the last axis by name of input or output. Raises ArtifactError
        when the graph cannot be loaded, or does not match `dims`."""
        try:
            self.session = ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no useful base
            reason = " ".join(str(error).split())
            raise ArtifactError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}; rebuild it") from error
        self.dims = dims
        self._check_graph(path, manifest, widths)
        self.cache = OrtCache(dims, manifest)
        self.buffers = _Buffers()
        self._binding = self.session.io_binding()
        self._bound: dict[str, NDArray[Any]] = {}

    def _check_graph(self, path: Path, manifest: Manifest, widths: Mapping[str, int]) -> None:
        """Raises ArtifactError for a tensor that is missing or has another shape than the arrays bound to it."""
        shapes = {end.name: end.shape for end in (*self.session.get_inputs(), *self.session.get_outputs())}
        head_bytes = cpu_cache_bytes(self.dims.head_dim, manifest.limits, manifest.precision)
        cache = {0: len(self.dims.attention_layers), 2: self.dims.num_kv_heads, 3: head_bytes}
        expected = {names.CACHE: cache} | {name: {-1: width} for name, width in widths.items()}
        if (d := self.dims.delta) and self.dims.delta_layers:
            states = {names.STATES: d.state_values, names.MOVES: d.moved_values}
            expected |= {name: {0: len(self.dims.delta_layers), 2: width} for name, width in states.items()}
        for name, axes in expected.items():
            shape = shapes.get(name)
            if shape is None or any(shape[axis:][:1] != [wanted] for axis, wanted in axes.items()):
                wanted = " and ".join(f"{wanted} on axis {axis}" for axis, wanted in axes.items())
                raise ArtifactError(f"{path}: {name} is {shape}, the manifest asks for {wanted}; rebuild the engine")

    def run(
        self,
        slots: Sequence[SlotRows],
        inputs: dict[str, NDArray[Any]],
        outputs: dict[str, NDArray[Any]],
        parents: NDArray[np.int32] = _NONE,
    ) -> None:
        """Write the slots' rows behind their committed ones and fill `outputs`; nothing is committed. Arrays from
        `buffers` stay bound while their shapes stay. `parents`: of the slots' nodes, those done included."""
        placed = self.buffers.take(names.SLOTS, (len(slots), 5), np.int64)
        for n, rows in enumerate(slots):
            self.cache.check_room(rows.slot, rows.contexts + rows.done + rows.nodes)
            placed[n] = rows.slot, self.cache.lengths[rows.slot], rows.contexts, rows.done, rows.nodes
        tree = self.buffers.take(names.PARENTS, parents.shape, np.int32)
        tree[:] = parents
        inputs = {**inputs, names.SLOTS: placed, names.PARENTS: tree, names.CACHE: self.cache.buffer}
        if (states := self.cache.states) is not None:
            layers, _, width = states.moves.shape
            states.moves = self.buffers.take(names.MOVES, (layers, len(parents), width), np.float32)
            inputs |= {names.STATES: states.values, names.MOVES: states.moves}
            starts = accumulate((rows.nodes for rows in slots), initial=0)
            self.cache.first_rows = {rows.slot: start for rows, start in zip(slots, starts, strict=False)}
        ends = ((inputs, self._binding.bind_ortvalue_input), (outputs, self._binding.bind_ortvalue_output))
        for arrays, bind in ends:
            for name, array in arrays.items():
                if self._bound.get(name) is not array:
                    bind(name, ort.OrtValue.ortvalue_from_numpy(array))
                    self._bound[name] = array
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error


class OrtLanguageModel(OrtNetwork):
    """A network with the target's graph: trees of tokens in, logits out."""

    def __init__(self, path: Path, dims: TransformerDims, manifest: Manifest, threads: int, *, taps: int = 0) -> None:
        """`taps` is M, the number of tapped layers."""
        self._tap_width = taps * dims.hidden_size
        widths = {names.LOGITS: dims.vocab_size} | ({names.TAPS: self._tap_width} if taps else {})
        super().__init__(path, dims, manifest, threads, widths=widths)

    def extend(self, chains: Sequence[VerifyRequest]) -> list[NDArray[np.float32]]:
        """See `drafters.LanguageModel`."""
        verdicts = [verdict for verdict, _ in self.extend_all(chains)]
        for chain in chains:
            self.cache.append(chain.slot, len(chain.tree))
        return [verdict.logits[-1] for verdict in verdicts]

    def extend_all(self, requests: Sequence[VerifyRequest]) -> list[tuple[Verdict, NDArray[np.float32] | None]]:
        """Write trees of T rows behind the committed ones of distinct slots, in one pass: of each the rows asked for,
        and tapped states [T, M·H]; None for a network without tapped layers."""
        take, sizes = self.buffers.take, [len(r.tree) for r in requests]
        starts = [0, *accumulate(sizes)]
        token_ids = take(names.TOKEN_IDS, (1, starts[-1]), np.int64)
        counts = [size - r.first_row for r, size in zip(requests, sizes, strict=True)]
        rows = take(names.ROWS, (max(1, sum(counts)),), np.int64)
        rows[-1] = starts[-1] - 1  # where none is asked for: the graph computes one at least
        np.concatenate([r.tree.token_ids for r in requests], out=token_ids[0])
        wanted = [np.arange(end - count, end) for end, count in zip(starts[1:], counts, strict=True)]
        np.concatenate(wanted, out=rows[: sum(counts)])
        logits = take(names.LOGITS, (len(rows), self.dims.vocab_size), np.float32)
        outputs, taps = {names.LOGITS: logits}, None
        if self._tap_width:
            outputs[names.TAPS] = taps = take(names.TAPS, (1, starts[-1], self._tap_width), np.float32)
        placed = [SlotRows(r.slot, size) for r, size in zip(requests, sizes, strict=True)]
        parents = np.concatenate([r.tree.parents for r in requests])
        self.run(placed, {names.TOKEN_IDS: token_ids, names.ROWS: rows}, outputs, parents)
        choices, own = logits.argmax(-1), [0, *accumulate(counts)]
        parts = zip(map(slice, own, own[1:]), map(slice, starts, starts[1:]), strict=True)
        return [(Verdict(choices[r], logits[r]), None if taps is None else taps[0, every]) for r, every in parts]
