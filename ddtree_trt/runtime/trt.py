"""The TensorRT engine: two plans, one stream, one block of device memory that never moves.

A round: `draft` and `verify` are each one copy up, one graph and one copy down, at which the host waits; `commit` puts
its work on the stream and waits for nothing. All slots of a call go through one pass. Tapped states stay on the device,
and logits do until a row is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import memory
from ddtree_trt import tensors as names
from ddtree_trt.artifact import Manifest
from ddtree_trt.errors import EngineError
from ddtree_trt.memory import FLOAT_BYTES, INT_BYTES, CacheShape, Layout
from ddtree_trt.plugins.library import KernelLibrary
from ddtree_trt.runtime.cuda import Device, Upload
from ddtree_trt.runtime.drafters import check_told
from ddtree_trt.runtime.engine import Draft, DraftRequest, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.kv import SlotLengths
from ddtree_trt.runtime.lazy_rows import LazyRows
from ddtree_trt.runtime.passes import buckets, pad_trees
from ddtree_trt.runtime.tree import token_chain
from ddtree_trt.runtime.trt_drafter import BlockDrafter, Buffers
from ddtree_trt.runtime.trt_load import Loaded, load_plans
from ddtree_trt.runtime.trt_network import Network

VERIFY, PREFILL = 0, 1  # the target's optimisation profiles


@dataclass(frozen=True)
class _Passed:
    """Where a slot's last target pass left its tapped states: [T, M·H] of which the first `rows` are the slot's."""

    generation: int  # which pass it was: the next one overwrites the states
    address: int
    padded_rows: int  # T


class TrtEngine:
    """The `Engine` protocol over TensorRT. One thread calls it."""

    threads = 1

    def __init__(self, manifest: Manifest, loaded: Loaded, kernels: KernelLibrary) -> None:
        """Owns what is `loaded`: `close` gives it back."""
        self.manifest, self._loaded, self._kernels = manifest, loaded, kernels
        self.device: Device = loaded.device
        self.limits, dims, drafter_dims = manifest.limits, manifest.target_dims, manifest.dflash
        size = memory.ELEMENT_BYTES[manifest.precision]
        self._words = -(-self.limits.max_tokens_per_pass // 32)
        self._buckets = buckets(1 + self.limits.max_tree_budget)
        self._state_bytes = len(drafter_dims.tap_layers) * dims.hidden_size * size
        self._cache_shape = CacheShape.of(dims, self.limits, size)
        self.cache = SlotLengths(self.limits.max_batch, self.limits.cache_rows)
        at, sizes = loaded.addresses, loaded.layout.sizes
        shared, device = loaded.shared, self.device
        self.target = Network("target", loaded.target, shared, dims, self._cache_shape, at[memory.TARGET_KV])
        drafter_cache = CacheShape.of(drafter_dims, self.limits, size)
        network = Network("drafter", loaded.drafter, shared, drafter_dims, drafter_cache, at[memory.DRAFTER_KV])

        def upload(name: str) -> Upload:
            return Upload(device, at[name], device.pinned(sizes[name]))

        self._host_results = device.pinned(sizes[memory.RESULTS])
        self._control = upload(memory.TARGET_CONTROL)
        # One for each slot: commits of a round follow each other without a wait.
        each = sizes[memory.COMMIT_CONTROL] // self.limits.max_batch
        self._commits = [
            Upload(device, at[memory.COMMIT_CONTROL] + slot * each, device.pinned(each))
            for slot in range(self.limits.max_batch)
        ]
        buffers = Buffers(at[memory.STATES], at[memory.CONTEXT], at[memory.RESULTS], self._host_results)
        self.drafter = BlockDrafter(
            network, device, drafter_dims, self.limits, size, buffers, upload(memory.DRAFTER_CONTROL), loaded.candidates
        )
        self._passed: dict[int, _Passed] = {}
        self._generation = 0

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> TrtEngine:
        """Load an engine directory whose digests were checked.

        Raises MissingDependency for what is not installed, ArtifactError for an engine of another toolchain, plugin or
        GPU, and EngineError when CUDA or TensorRT fails or the GPU's memory is too small.
        """
        loaded, kernels = load_plans(directory, manifest)
        try:
            return cls(manifest, loaded, kernels)
        except BaseException:
            loaded.close()
            raise

    @property
    def layout(self) -> Layout:
        """Where everything lies in the one block of device memory."""
        return self._loaded.layout

    @property
    def waits(self) -> int:
        """How often the host has waited for the device."""
        return self.device.waits

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]

    def draftable_length(self, slot: int) -> int:
        return self.drafter.known(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)
        self.drafter.truncate(slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        """A chain under a causal mask, in the profile for prompts. Not captured: a chunk has work enough to hide its
        launches, and every prompt ends in a chunk of another length."""
        tokens = len(token_ids)
        tree = token_chain(token_ids)
        first = 0 if rows == "all" else tokens - 1  # an engine computes one row at least
        choices = self._target_pass([VerifyRequest(slot, tree)], tokens, np.arange(first, tokens), PREFILL)
        self.commit(slot, np.arange(tokens, dtype=np.int32), taps=taps)
        return Verdict(choices, self._logits(0, len(choices)))

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        longest = max(len(r.tree) for r in requests)
        if longest > self._buckets[-1]:
            raise EngineError(f"a tree of {longest} tokens, the engine was built for {self._buckets[-1]}")
        tokens = next(t for t in self._buckets if t >= longest)
        choices = self._target_pass(requests, tokens, np.arange(len(requests) * tokens), VERIFY)
        starts, sizes = range(0, len(choices), tokens), [len(r.tree) for r in requests]
        return [
            Verdict(choices[start : start + size], self._logits(start, size))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _target_pass(
        self, requests: Sequence[VerifyRequest], tokens: int, rows: NDArray[np.int64], profile: int
    ) -> NDArray[np.int64]:
        """One pass over all trees, T padded to `tokens`: the choices [R] at the wanted flat rows."""
        for request in requests:
            self.cache.check_room(request.slot, tokens)
        trees = pad_trees(requests, self.cache.lengths, tokens, self._words)
        control = {
            names.TOKEN_IDS: trees.token_ids,
            names.POSITIONS: trees.positions,
            names.SLOT_IDS: trees.slot_ids,
            names.PAST_LEN: trees.past_len,
            names.TREE_MASK: trees.tree_mask,
            names.ROWS: rows.astype(np.int32),
        }
        at = self._loaded.addresses
        self._generation += 1
        for n, request in enumerate(requests):
            states = at[memory.TAPS] + n * tokens * self._state_bytes
            self._passed[request.slot] = _Passed(self._generation, states, tokens)
        addresses = self._control.send(control)
        addresses[names.CHOICES], addresses[names.LOGITS] = at[memory.RESULTS], at[memory.LOGITS]
        addresses[names.TAPS] = at[memory.TAPS]
        shapes = {name: array.shape for name, array in control.items()}
        key = (len(requests), tokens) if profile == VERIFY else None
        self.target.run(profile, shapes, addresses, key=key)
        found = self._host_results[: len(rows) * INT_BYTES]
        self.device.download(found, at[memory.RESULTS])
        self.device.synchronize()
        return found.view(np.int32).astype(np.int64)

    def _logits(self, first: int, rows: int) -> NDArray[np.float32]:
        """Rows of the last pass's logits, [rows, V] from row `first` on, brought over row by row when they are read."""
        vocab, generation = self.manifest.target_dims.vocab_size, self._generation
        base = self._loaded.addresses[memory.LOGITS] + first * vocab * FLOAT_BYTES

        def fetch(start: int, stop: int) -> NDArray[np.float32]:
            if generation != self._generation:
                raise EngineError("these logits are gone: the engine has made another target pass since")
            found = np.empty((stop - start, vocab), np.float32)
            self.device.download(found, base + start * vocab * FLOAT_BYTES)
            self.device.synchronize()
            return found

        return cast("NDArray[np.float32]", LazyRows(rows, vocab, fetch))

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        size, passed = len(path), self._passed.get(slot)
        if passed is None or passed.generation != self._generation:
            raise EngineError(f"slot {slot} was not in the last target pass: there is nothing to commit")
        if taps:
            check_told(self.drafter, self.cache, slot)
        if int(path[-1]) != size - 1:
            self._compact(slot, path, passed if taps else None)
        if taps:
            self.drafter.learn(slot, passed.address, size)
        self.cache.append(slot, size)
        del self._passed[slot]

    def _compact(self, slot: int, path: NDArray[np.int32], passed: _Passed | None) -> None:
        """Move the path's rows to the front: in the cache, and in the tapped states, which move like a cache of one
        plane, slot and head."""
        zero, cache = np.zeros(1, np.int32), self._cache_shape
        at = self._commits[slot].send(
            {
                "slot": np.array([slot], np.int32),
                "past": np.array([self.cache.lengths[slot]], np.int32),
                "count": np.array([len(path)], np.int32),
                "zero": zero,
                "keep": path.astype(np.int32, copy=False),
            }
        )
        moves: dict[str, Any] = {
            "keep": at["keep"],
            "keep_count": at["count"],
            "sequences": 1,
            "max_keep": len(path),
        }
        self._kernels.launch(
            "compact",
            self.device.stream,
            cache=self._loaded.addresses[memory.TARGET_KV],
            slot_ids=at["slot"],
            past_len=at["past"],
            planes=cache.planes,
            slots=cache.stored_slots,
            kv_heads=cache.kv_heads,
            capacity=cache.rows,
            row_bytes=cache.row_bytes,
            **moves,
        )
        if passed is not None:
            self._kernels.launch(
                "compact",
                self.device.stream,
                cache=passed.address,
                slot_ids=at["zero"],
                past_len=at["zero"],
                planes=1,
                slots=1,
                kv_heads=1,
                capacity=passed.padded_rows,
                row_bytes=self._state_bytes,
                **moves,
            )

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            check_told(self.drafter, self.cache, request.slot)
        return self.drafter.draft_all(requests) if requests else []

    def settle(self) -> None:
        self.device.synchronize()

    def close(self) -> None:
        """Give all memory back; a second call does nothing. Raises EngineError when CUDA refuses."""
        self._passed.clear()
        self._generation += 1
        try:
            self.device.stop()
        finally:
            self.target.close()
            self.drafter.network.close()
            self._loaded.close()
