"""The PyTorch engine: on NVIDIA GPUs with our kernels and CUDA graphs, on a CPU for numerics.

A round on a GPU: `draft` and `verify` are each one copy up, one captured graph and one copy down, at which the host
waits; `commit` puts its work on the stream and waits for nothing. All slots of a call go through one pass. Rounds that
need no host at all are `flight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import TARGET
from ddtree_trt.device import memory
from ddtree_trt.device.buckets import buckets
from ddtree_trt.errors import EngineError
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, LogitRows, Rows, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.drafters import check_up_to_date, draft_all
from ddtree_trt.runtime.engines.lazy_rows import LazyRows
from ddtree_trt.runtime.engines.padding import pad_trees
from ddtree_trt.runtime.engines.torch.attention import Place, Scratch, attention_for
from ddtree_trt.runtime.engines.torch.cache import DeviceCache
from ddtree_trt.runtime.engines.torch.drafters import BlockDrafter, make_drafter
from ddtree_trt.runtime.engines.torch.flight import TorchRounds
from ddtree_trt.runtime.engines.torch.graphs import Download, Graphs, Upload
from ddtree_trt.runtime.engines.torch.model import Qwen3
from ddtree_trt.runtime.engines.torch.weights import (
    DTYPES,
    check_device,
    choose_device,
    device_name,
    keep_sums_single,
    read_weights,
)
from ddtree_trt.runtime.tree import token_chain

# Below this many bytes of weights a pass on a CPU is too short for threads to help.
SINGLE_THREAD_BYTES = 64 << 20


@dataclass(frozen=True)
class _Passed:
    """A slot's last target pass."""

    token_ids: NDArray[np.int64]  # [T]
    taps: Tensor | None  # [T, M·H] on the device


class TorchEngine:
    """The `Engine` protocol in PyTorch. One thread calls it."""

    def __init__(
        self, manifest: Manifest, weights: dict[str, Tensor], device: torch.device, *, capture: bool = True
    ) -> None:
        """`weights` by the names of `weight_layout`, on the device and in the manifest's precision."""
        if device.type == "cuda":
            keep_sums_single()
        # Latencies measured on one device are not those of another: a profile is known by the toolchain it is for.
        toolchain = {**manifest.toolchain, "device": device_name(device)}
        self.manifest, self.device = replace(manifest, toolchain=toolchain), device
        self.threads = 1 if device.type == "cuda" else torch.get_num_threads()
        self.limits, dims, draft_dims = manifest.limits, manifest.target_dims, manifest.drafter_dims
        slots, rows, dtype = self.limits.max_batch, self.limits.cache_rows, DTYPES[manifest.precision]
        scratch = Scratch(memory.attention_workspace_bytes((dims, draft_dims), self.limits), device)
        attention = attention_for(device, dtype, dims.head_dim, scratch)
        self.kernels = attention.kernels
        self.cache = DeviceCache(dims, slots, rows, dtype, device, kernels=attention.kernels)
        taps = manifest.drafting.tap_layers
        self.target = Qwen3(dims, weights, TARGET, self.cache, attention, taps)
        self.graphs = Graphs(device, capture=capture)
        self.drafter = make_drafter(manifest, weights, self.target, scratch, self.graphs)
        self.flights: list[TorchRounds] = []  # whatever launches rounds ahead: told of every other verb
        # A round without the host has no place for a drafter whose next token is drawn there.
        self.rounds = TorchRounds(self, self.drafter) if isinstance(self.drafter, BlockDrafter) else None
        # T counts padding; a CPU pads to the longest tree of the call only.
        tokens = self.limits.max_tokens_per_pass
        self.buckets = buckets(tokens) if device.type == "cuda" else list(range(1, tokens + 1))
        words = -(-tokens // 32)
        self._control = Upload(Upload.size((slots,), (slots,), *[(slots, tokens)] * 2, (slots, tokens, words)), device)
        # One for each slot: commits of a round follow each other without a wait.
        self._commits = [Upload(Upload.size((1,), (1,), (1,), (tokens,)), device) for _ in range(slots)]
        self._choices = Download(slots * tokens, device)
        self.logits = torch.empty(slots * tokens, dims.vocab_size, device=device)  # of the last tree pass
        self._taps = torch.empty(slots * tokens, len(taps) * dims.hidden_size, dtype=dtype, device=device)
        self._passed: dict[int, _Passed] = {}

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, *, threads: int = 0) -> TorchEngine:
        """Load an engine directory whose digests were checked, on the GPU where there is one.

        Raises ArtifactError for a precision this device cannot compute in, and MissingDependency without the kernels.
        On a CPU the number of threads is the process's: PyTorch knows no other.
        """
        device = choose_device()
        check_device(directory, manifest, device)
        if device.type == "cpu":
            small = manifest.files[artifact.TORCH_WEIGHTS].size < SINGLE_THREAD_BYTES
            torch.set_num_threads(threads or (1 if small else torch.get_num_threads()))
        return cls(manifest, read_weights(directory, manifest, device), device)

    @property
    def waits(self) -> int:
        """How often the host has waited for the device in `draft` and `verify`."""
        return self._choices.waits + self.drafter.waits

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]

    def draftable_length(self, slot: int) -> int:
        return self.drafter.known(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.leave(slot)
        self.cache.truncate(slot, length)
        self.drafter.truncate(slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        """Not captured: a chunk has work enough to hide its launches."""
        self.leave(slot)
        size = len(token_ids)
        tree = token_chain(token_ids)
        place, ids, positions = self._send([VerifyRequest(slot, tree)], self.bucket(size), MaskMode.CAUSAL)
        hidden, tapped = self.target.forward(ids, positions, place, MaskMode.CAUSAL)
        self._passed[slot] = _Passed(token_ids, None if tapped is None else tapped[0, :size])
        self.commit(slot, np.arange(size, dtype=np.int32), taps=taps)
        first = {"all": 0, "last": size - 1, "none": size}[rows]
        logits = self.target.logits(hidden[0, first:size])
        choices = logits.argmax(-1).cpu().numpy() if rows != "none" else np.empty(0, np.int64)
        return Verdict(choices, _readable(logits))

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        self.leave(*(r.slot for r in requests))
        batch, tokens = len(requests), self.bucket(max(len(r.tree) for r in requests))
        place, ids, positions = self._send(requests, tokens, MaskMode.TREE)
        rows, on_device = batch * tokens, self._choices.on_device

        def work() -> None:
            hidden, tapped = self.target.forward(ids, positions, place, MaskMode.TREE)
            logits = self.target.logits(hidden.flatten(0, 1), out=self.logits[:rows])
            on_device[:rows].copy_(logits.argmax(-1))
            if tapped is not None:
                self._taps[:rows].copy_(tapped.flatten(0, 1))

        self._passed.clear()  # the states of passes before this one are overwritten
        self.graphs.run((batch, tokens), work)
        choices = self._choices.fetch(rows).astype(np.int64).reshape(batch, tokens)
        verdicts = []
        for n, request in enumerate(requests):
            size, start = len(request.tree), n * tokens
            taps = self._taps[start : start + size] if self.target.taps else None
            self._passed[request.slot] = _Passed(request.tree.token_ids, taps)
            verdicts.append(Verdict(choices[n, :size], _readable(self.logits[start : start + size])))
        return verdicts

    def bucket(self, tokens: int) -> int:
        """The T of a pass with so many real rows. Raises EngineError when there is none."""
        for size in self.buckets:
            if size >= tokens:
                return size
        raise EngineError(f"a pass of {tokens} tokens is longer than the {self.buckets[-1]} this engine was made for")

    def _send(self, requests: Sequence[VerifyRequest], tokens: int, mode: MaskMode) -> tuple[Place, Tensor, Tensor]:
        """A pass's control data, T padded to `tokens`: where it goes, token ids and positions int32 [N, T]."""
        for request in requests:
            self.cache.check_room(request.slot, tokens)
        padded = pad_trees(requests, self.cache.lengths, tokens, -(-tokens // 32))
        control = (padded.slot_ids, padded.past_len, padded.token_ids, padded.positions)
        if mode is not MaskMode.TREE:
            slots, past, ids, positions = self._control.send(*control)
            return Place(slots, past), ids, positions
        slots, past, ids, positions, mask = self._control.send(*control, padded.tree_mask)
        return Place(slots, past, mask), ids, positions

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        size = len(path)
        moved = int(path[-1]) != size - 1
        keep: Tensor | None = None
        if moved:
            control = (np.array([v], np.int32) for v in (slot, self.cache.lengths[slot], size))
            slots, past, count, keep = self._commits[slot].send(*control, path.astype(np.int32, copy=False))
            self.cache.compact(slots, past, keep[None], count)
        if taps:
            check_up_to_date(self.drafter, self.cache, slot)
            passed = self._passed.get(slot)
            if passed is None:
                raise EngineError(f"slot {slot} was not in the last target pass: its states are gone")
            states = passed.taps
            if states is not None:
                states = states[:size] if keep is None else states.index_select(0, keep)
            self.drafter.learn(slot, passed.token_ids[path], states)
        self.cache.append(slot, size)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.leave(*(r.slot for r in requests))
        return draft_all(self.drafter, self.cache, requests)

    def warm_up(self) -> None:
        """On a GPU: a prompt's chunk, and every graph of one sequence's rounds by stages. Graphs of more sequences and
        of rounds on the device are captured when they are first needed, each in the time of a pass or two."""
        if self.device.type != "cuda":
            return
        limits = self.limits
        largest = self.bucket(1 + limits.max_tree_budget)
        try:
            for tokens in reversed([size for size in self.buckets if size <= largest]):
                self.verify([VerifyRequest(0, token_chain(np.zeros(tokens, np.int64)))])
            chunk = min(limits.prefill_chunk, limits.max_seq_len - 1)
            self.prefill(0, np.zeros(chunk, np.int64), rows="last", taps=True)
            self.drafter.warm_up(limits.max_tree_budget)
        finally:
            self.truncate(0, 0)
            self._passed.clear()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def leave(self, *slots: int) -> None:
        """Something other than a flight's own rounds is about to touch these slots."""
        for flight in self.flights:
            for slot in slots:
                flight.leave(slot)

    def close(self) -> None:
        try:
            self.settle()  # rounds may still be under way, in the memory that is given back here
        finally:
            for flight in list(self.flights):
                flight.close()
            self.rounds = None
            self._passed.clear()
            self.graphs.clear()
            for name in ("target", "drafter", "cache", "logits", "_taps"):
                vars(self).pop(name, None)


def _readable(logits: Tensor) -> Rows:
    """Logits [R, V] as the host reads them: on a CPU the same memory, from a GPU row by row when asked for."""
    if logits.device.type == "cpu":
        array: NDArray[np.float32] = logits.numpy()
        return array
    return LazyRows(logits.shape[0], logits.shape[1], lambda start, stop: logits[start:stop].cpu().numpy())
