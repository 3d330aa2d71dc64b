"""The PyTorch engine: on NVIDIA GPUs with our kernels and CUDA graphs, on a CPU for numerics.

The protocol's calls over a target (`target.py`), a drafter and, for blocks, rounds on the device (`rounds.py`). On a
GPU, `draft` and `verify` are each one upload, one captured graph and one download, for which the host waits; `commit`
waits for nothing. All slots of a call are in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.weight_layout import DRAFTER, TARGET
from ddtree_trt.device import memory
from ddtree_trt.device.buffers import RoundShapes
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, LogitRows, Verdict, VerifyRequest, why_inexact
from ddtree_trt.runtime.engines.drafters import SlotCalls, make_drafter
from ddtree_trt.runtime.engines.passes import make_single_passes
from ddtree_trt.runtime.engines.torch.attention import DeviceCache, attention_for, scratch_memory
from ddtree_trt.runtime.engines.torch.device_round import BlockOnDevice
from ddtree_trt.runtime.engines.torch.model import DrafterParts, Weights
from ddtree_trt.runtime.engines.torch.parallel.split import ALONE, Shard
from ddtree_trt.runtime.engines.torch.products import PYTORCH, Scaled, fixed_order
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds
from ddtree_trt.runtime.engines.torch.target import TargetPass
from ddtree_trt.runtime.engines.torch.weights import (
    DTYPES,
    check_device,
    choose_device,
    device_name,
    quantise,
    read_weights,
    use_float32_sums,
)
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.tree import token_chain


class TorchEngine(SlotCalls):
    """The `Engine` protocol in PyTorch. One thread calls it."""

    target: TargetPass
    mixes = False

    def __init__(self, manifest: Manifest, weights: Weights, device: torch.device, shard: Shard = ALONE) -> None:
        """`weights` by the names of `weight_layout`, on the device and in the manifest's precision, or `Scaled`.
        `shard`: the part of the target that these are, with a manifest of that part's dimensions. Raises UsageError for
        weights in FP8 on a GPU that cannot multiply them."""
        if device.type == "cuda":
            use_float32_sums()
        # Latencies depend on the device: the toolchain is a part of the latency profile's fingerprint.
        scaled = {name: w for name, w in weights.items() if isinstance(w, Scaled)}
        toolchain = {**manifest.toolchain, "device": device_name(device)}
        if scaled:
            toolchain["fp8"] = " ".join(sorted({name.partition(".")[0] for name in scaled}))
        self.manifest = replace(manifest, toolchain=toolchain)
        self.device = device
        self.threads = 1 if device.type == "cuda" else torch.get_num_threads()
        self.limits, dims, draft_dims = manifest.limits, manifest.target_dims, manifest.drafter_dims
        dtype = DTYPES[manifest.precision]
        scratch = scratch_memory(memory.attention_workspace_bytes((dims, draft_dims), self.limits), device)
        attention = attention_for(device, dtype, dims.head_dim, scratch)
        kernels = device.type == "cuda" and attention.kernels
        self.inexact, products, own = why_inexact(manifest, kernels=kernels, ranks=shard.size), PYTORCH, PYTORCH
        if self.inexact is None:
            products, self.inexact = fixed_order({n: w for n, w in weights.items() if n.startswith(TARGET)}, device)
        in_drafter = {name: w for name, w in scaled.items() if name.startswith(DRAFTER)}
        if in_drafter and device.type == "cuda" and weights[f"{DRAFTER}norm"].dtype != torch.float32:
            own, _ = fixed_order(in_drafter, device)
        lacks = (in_drafter and own is PYTORCH) or (len(scaled) > len(in_drafter) and products is PYTORCH)
        if lacks and device.type == "cuda":
            raise UsageError(
                "fp8 on a GPU needs an engine in bf16 or fp16, compute capability 8.9 or higher, and Triton; found "
                f"{manifest.precision} on {device_name(device)}: {self.inexact}; use fp8 off"
            )
        taps = manifest.drafting.tap_layers
        self.target = TargetPass(manifest, weights, taps, attention, device, shard, products)
        drafter_dtype = weights[f"{DRAFTER}norm"].dtype  # a block drafter may have another precision than its target
        own_attention = attention_for(device, drafter_dtype, draft_dims.head_dim, scratch)
        slots, rows = self.limits.max_batch, self.target.cache.rows
        cache = DeviceCache(draft_dims, slots, rows, drafter_dtype, device, kernels=own_attention.kernels)
        parts = DrafterParts(weights, self.target.network, cache, own_attention, self.target.graphs, own)
        self.drafter = make_drafter(manifest, parts)
        # Rounds on the device need a whole draft in one pass, which is a block drafter's, marginals, the whole rows of
        # logits that they draw from, a cache that a round launched in vain leaves as it is, and rows of whole 16 bytes.
        block = self.drafter if isinstance(self.drafter, BlockOnDevice) else None
        without = block is None or manifest.drafting.pairs or shard.size > 1 or dims.delta
        self.rounds = None
        odd = block and any(x.shape[-1] * x.element_size() % 16 for x in (self.target.cache.slab, block.waiting))
        if block is not None and not without and not odd:
            shapes = RoundShapes.of(self.limits, block.dims.draft_length, block.dims.head_size)
            self.rounds = TorchRounds(self.target, block, shapes)

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> TorchEngine:
        """Load an engine directory whose digests were checked, on the GPU where there is one. Raises ArtifactError for
        a precision this device cannot compute in, and MissingDependency without the kernels. On a CPU `threads` applies
        to the whole process, as PyTorch has no other setting."""
        device = choose_device()
        check_device(directory, manifest, device)
        if device.type == "cpu":
            small = manifest.files[artifact.TORCH_WEIGHTS].size < SINGLE_THREAD_BYTES
            torch.set_num_threads(options.threads or (1 if small else torch.get_num_threads()))
        weights = read_weights(directory, manifest, device)
        if options.fp8 != "off":
            quantise(weights, manifest, options.fp8)
        return cls(manifest, weights, device)

    @property
    def buckets(self) -> Sequence[int]:
        return self.target.buckets

    def truncate(self, slot: int, length: int) -> None:
        self._leave_rounds([slot])
        super().truncate(slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        self._leave_rounds([slot])
        request = VerifyRequest(slot, token_chain(token_ids), rows=rows)
        hidden = self.target.prefill(request)
        # First the commit: what the drafter takes in of the prompt is on the stream before the host waits.
        self.commit(slot, np.arange(len(token_ids), dtype=np.int32), taps=taps)
        return self.target.verdict(hidden[request.first_row :])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._leave_rounds(r.slot for r in requests)
        return super().draft(requests)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        self._leave_rounds(r.slot for r in requests)
        return self.target.verify(requests)

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        token_ids, states = self.target.commit(slot, path)
        if taps:
            self.drafter.append_context(slot, token_ids, states)

    def _leave_rounds(self, slots: Iterable[int]) -> None:
        if self.rounds is not None:
            for slot in slots:
                self.rounds.leave(slot)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """On a GPU: run a prompt's chunk and capture all graphs of rounds on the device, and those of one sequence's
        rounds by stages. Those of more sequences are captured at their first use, in the time of a pass or two each."""
        if self.device.type != "cuda":
            return
        budget = self.limits.max_tree_budget
        largest = self.target.bucket(1 + budget)
        drafts = partial(self.drafter.warm_up, budget=budget)
        make_single_passes(self, [size for size in self.buckets if size <= largest], drafts, progress)
        if self.rounds is not None:
            self.rounds.warm_up(progress)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        try:
            self.synchronize()  # launched rounds may still use the memory that is released here
        finally:
            self.rounds = None
            self.release()
