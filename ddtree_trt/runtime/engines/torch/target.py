"""The target on a device: its network and cache, and passes over the trees of several slots. Rounds that stay on the
device (`device_round.py`) run the same network over the same cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import TARGET
from ddtree_trt.device.buffers import logit_rows, tree_sizes
from ddtree_trt.errors import EngineError
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import Verdict, VerifyRequest
from ddtree_trt.runtime.engines.passes import LazyRows, mask_words, pad_trees
from ddtree_trt.runtime.engines.torch.attention import Attention, DeviceCache, Place, has_kernels, load_operators
from ddtree_trt.runtime.engines.torch.delta import States
from ddtree_trt.runtime.engines.torch.graphs import Download, Graphs, Upload
from ddtree_trt.runtime.engines.torch.model import LanguageModel, Weights
from ddtree_trt.runtime.engines.torch.parallel.split import ALONE, Shard
from ddtree_trt.runtime.engines.torch.products import PYTORCH, Products
from ddtree_trt.runtime.engines.torch.weights import DTYPES
from ddtree_trt.runtime.tree import token_chain

_ALL = slice(None)


class TargetPass:
    """The target's network, cache, buffers and passes, used by the engine and by its rounds on the device.

    `kernels`: whether `torch.ops.ddtree` works on this device. `buckets`: the sizes T of passes, rising. `logits`:
    float32 [`logit_rows`, V], where V is the shard's part of the vocabulary: what was computed last of the last pass's.
    """

    def __init__(
        self, manifest: Manifest, weights: Weights, taps: tuple[int, ...], attention: Attention, device: torch.device,
        shard: Shard = ALONE, products: Products = PYTORCH,
    ) -> None:  # fmt: skip
        """`weights` by the names of `weight_layout`; `taps`: the layers whose outputs are the drafter's input."""
        limits, dims, dtype = manifest.limits, manifest.target_dims, DTYPES[manifest.precision]
        slots, tokens = limits.max_batch, limits.max_tokens_per_pass
        self.device = device
        self.kernels = attention.kernels
        # Passes that wait for other ranks are not captured.
        self.graphs = Graphs(device, capture=shard.size == 1)
        # On a CPU, without captures, a pass is as long as its longest tree.
        self.buckets: Sequence[int] = range(1, tokens + 1)
        if device.type == "cuda":  # the largest is a prompt's, which is not padded
            self.buckets = sorted({*tree_sizes(1 + limits.max_tree_budget), tokens})
        kernels, rows, states = attention.kernels, slots * self.bucket(1 + limits.max_tree_budget), None
        if dims.delta is not None:
            ours = kernels or has_kernels(device, dtype)
            if ours:
                load_operators()
            most = max(rows, tokens)
            states = States(dims, slots, limits.snapshot_every, most, dtype, device, kernels=ours)
        self.cache = DeviceCache(dims, slots, limits.cache_rows, dtype, device, kernels=kernels, states=states)
        self.network = LanguageModel(dims, weights, TARGET, self.cache, attention, taps, shard, products)
        self.logits = torch.empty(logit_rows(limits), self.network.vocabulary.rows, device=device)
        # Of passes over trees with more rows the network's output is kept, to compute them again.
        kept = rows if rows > len(self.logits) else 0
        self._kept = torch.empty(kept, dims.hidden_size, dtype=dtype, device=device)
        self._begin(self._kept, 0)
        self._taps = torch.empty(rows, len(taps) * dims.hidden_size, dtype=dtype, device=device)
        mask = (slots, tokens, mask_words(tokens))
        self._control = Upload(device, (slots,), (slots,), *[(slots, tokens)] * 3, mask)
        # One for each slot, so that the commits of a round need no wait between them.
        self._commits = [Upload(device, (1,), (1,), (1,), (tokens,)) for _ in range(slots)]
        self._choices = Download(rows, device)
        # By slot, with its tapped states [T, M·H] on the device, and its first row of all in the pass.
        self._last_pass: dict[int, tuple[VerifyRequest, Tensor | None, int]] = {}

    def bucket(self, tokens: int) -> int:
        """The T of a pass with `tokens` real rows. Raises EngineError when it would be longer than the largest
        bucket."""
        for size in self.buckets:
            if size >= tokens:
                return size
        raise EngineError(f"a pass of {tokens} tokens is longer than the {self.buckets[-1]} this engine was made for")

    def prefill(self, request: VerifyRequest) -> Tensor:
        """Append a chunk of a prompt [T], for `commit` to keep: the network's output [T, H]. Not captured: a chunk's
        work takes longer than its launches."""
        size = len(request.tree)
        self._last_pass.clear()  # what a hybrid kept of earlier passes is overwritten
        place, ids, positions = self._send([request], size, MaskMode.CAUSAL)
        hidden, tapped = self.network.forward(ids, positions, place, MaskMode.CAUSAL)
        self._last_pass[request.slot] = request, None if tapped is None else tapped[0, :size], 0
        return hidden[0, :size]

    def verdict(self, hidden: Tensor) -> Verdict:
        """The results at rows [R, H] of a prompt's output. The host waits for the choices, unless R is 0."""
        self._begin(hidden, len(hidden))
        choices = self._choose(hidden).cpu().numpy() if len(hidden) else np.empty(0, np.int64)
        return self._judged(choices, 0)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One pass over all trees. The host waits for the choices; logits stay on the device until they are read, and
        where they are more than `logits` has room for, are computed again by then."""
        longest = max(len(r.tree) for r in requests)
        padding = self.cache.padding([r.slot for r in requests], self.bucket(longest))
        sent = [*requests, *(VerifyRequest(slot, token_chain(np.zeros(1, np.int64))) for slot in padding)]
        place, ids, positions = self._send(sent, longest, MaskMode.TREE)
        batch, tokens = ids.shape
        rows, on_device = batch * tokens, self._choices.on_device

        def work() -> None:
            hidden, tapped = self.network.forward(ids, positions, place, MaskMode.TREE)
            hidden = hidden.flatten(0, 1)
            on_device[:rows].copy_(self._choose(hidden))
            if rows > len(self.logits):
                self._kept[:rows].copy_(hidden)
            if tapped is not None:
                self._taps[:rows].copy_(tapped.flatten(0, 1))

        self._last_pass.clear()  # the tapped states of earlier passes are overwritten
        self.graphs.run(("verify", batch, tokens), work)
        self._begin(self._kept[:rows], rows)
        choices = self._choices.fetch(rows).astype(np.int64).reshape(batch, tokens)
        verdicts = []
        for n, request in enumerate(requests):
            size, start = len(request.tree), n * tokens
            taps = self._taps[start : start + size] if self.network.taps else None
            self._last_pass[request.slot] = request, taps, start
            verdicts.append(self._judged(choices[n, :size], start))
        return verdicts

    def _begin(self, output: Tensor, rows: int) -> None:
        """Have `read` know the last pass: the network's output [R, H], as far as it is kept, and its R rows."""
        self._output = output
        self._held = (rows - 1) // len(self.logits) * len(self.logits)  # the first of those whose logits are held
        self._verdicts: list[slice] = []  # rows of the verdicts, by their numbers

    def _choose(self, hidden: Tensor) -> Tensor:
        """The most probable next tokens int64 [R] of rows [R, H], as many at a time as `logits` has room for."""
        parts, argmax = hidden.split(len(self.logits)), self.network.vocabulary.argmax
        return torch.cat([argmax(self.network.logits(part, out=self.logits[: len(part)])) for part in parts])

    def _judged(self, choices: NDArray[np.int64], first: int) -> Verdict:
        """The verdict of rows of the last pass, from its row `first` on."""
        number, rows = len(self._verdicts), len(choices)
        self._verdicts.append(slice(first, first + rows))

        def fetch(start: int, stop: int, columns: slice) -> NDArray[np.float32]:
            found: NDArray[np.float32] = self.read(number, slice(start, stop), columns).cpu().numpy()
            return found

        return Verdict(choices, LazyRows(rows, self.network.vocabulary.rows, fetch))

    def read(self, number: int, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """A copy of logits of the last pass's verdict of that number, float32 [R, V] or of some rows and columns."""
        place, most, found = self._verdicts[number], len(self.logits), list[Tensor]()
        wanted = range(place.start, place.stop)[rows]
        for first in range(wanted.start // most * most, wanted.stop, most):
            if first != self._held:
                part = self._output[first : first + most]
                self.network.logits(part, out=self.logits[: len(part)])
                self._held = first
            held = self.logits[max(wanted.start - first, 0) : wanted.stop - first, columns]
            found.append(held.clone())
        return torch.cat(found)

    def commit(self, slot: int, path: NDArray[np.int32]) -> tuple[NDArray[np.int64], Tensor | None]:
        """Keep the rows `path` [m] of the slot's last pass. Returns their token ids [m] and, where layers are tapped,
        their states [m, M·H] on the device. Raises EngineError for a slot that was not in the last pass."""
        if slot not in self._last_pass:
            raise EngineError(f"slot {slot} was not in the last target pass: its states are gone")
        (request, states, first), size = self._last_pass.pop(slot), len(path)
        rows: slice | Tensor = slice(first, first + size)
        if int(path[-1]) == size - 1:
            states = None if states is None else states[:size]
        else:
            keep = self._compact(slot, path)
            states = None if states is None else states.index_select(0, keep)
            rows = keep + first
        if self.cache.states is not None:
            self.cache.states.commit(slot, rows, self.cache.lengths[slot], size, prompt_ends=request.rows == "last")
        self.cache.append(slot, size)
        return request.tree.token_ids[path], states

    def _compact(self, slot: int, path: NDArray[np.int32]) -> Tensor:
        """Move the rows of a path with gaps to the front of the cache's new rows; returns the path on the device."""
        control = (np.array([v], np.int32) for v in (slot, self.cache.lengths[slot], len(path)))
        slots, past, count, keep = self._commits[slot].send(*control, path.astype(np.int32, copy=False))
        self.cache.compact(slots, past, keep[None], count)
        return keep

    def _send(self, requests: Sequence[VerifyRequest], longest: int, mode: MaskMode) -> tuple[Place, Tensor, Tensor]:
        """Upload the control data of a pass over trees of at most `longest` tokens; returns the place of its rows, and
        token ids and positions int32 [N, T]."""
        tokens = self.bucket(longest)
        if mode is not MaskMode.TREE:
            tokens = longest  # no graph is captured
        for request in requests:
            self.cache.check_room(request.slot, tokens)
        padded = pad_trees(requests, self.cache.lengths, tokens, mask_words(tokens))
        control = (padded.slot_ids, padded.past_len, padded.token_ids, padded.positions)
        if mode is not MaskMode.TREE:
            slots, past, ids, positions = self._control.send(*control)
            return Place(slots, past), ids, positions
        above = () if self.cache.states is None else (padded.parents,)
        slots, past, ids, positions, mask, *parents = self._control.send(*control, padded.tree_mask, *above)
        return Place(slots, past, mask, *parents), ids, positions
