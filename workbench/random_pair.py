"""Pairs of published shapes with random weights, made on the device: for times where no checkpoint is at hand.

Weights are scaled so that logits are about as peaked as a trained network's; else trees would have shapes that no real
one has. No draft is ever accepted but by chance, and the text means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.weight_layout import TARGET, stored_weights
from ddtree_trt.drafters.dflash.dims import DFlashDims, default_tap_layers
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import BIAS, TransformerDims
from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.weights import DTYPES
from workbench.options import bare_manifest

LOGIT_STD = 10.0


@dataclass(frozen=True)
class PairShape:
    """The dimensions of a target and its drafter."""

    target: TransformerDims
    draft_layers: int
    tied: bool
    block_size: int = 16

    @property
    def drafter(self) -> DFlashDims:
        layers = self.target.num_layers
        plain = {"num_layers": self.draft_layers, "delta": None, "rotary_dim": None}
        return DFlashDims(
            **{**vars(self.target), **plain},
            block_size=self.block_size,
            mask_token_id=self.target.vocab_size - 1,
            tap_layers=default_tap_layers(layers, self.draft_layers),
            num_target_layers=layers,
        )


def _qwen3(hidden: int, layers: int, heads: int, inner: int) -> TransformerDims:
    return TransformerDims(151936, hidden, layers, heads, 8, 128, inner, 1e-6, 1e6, 40960)


def _hybrid(dims: TransformerDims, key_heads: int, value_heads: int, size: int) -> TransformerDims:
    """One layer of four with attention, of whose heads a quarter is rotated."""
    delta = DeltaNet(key_heads, value_heads, size, size, 4, tuple(range(3, dims.num_layers, 4)))
    return replace(dims, delta=delta, rotary_dim=dims.head_dim // 4)


_QWEN3_5 = TransformerDims(248320, 4096, 32, 16, 4, 256, 12288, 1e-6, 1e7, 262144)

SHAPES: Mapping[str, PairShape] = {
    "micro": PairShape(TransformerDims(512, 64, 6, 4, 2, 16, 128, 1e-6, 1e4, 2048), 2, True, 8),  # for a dry run
    "qwen3-0.6b": PairShape(_qwen3(1024, 28, 16, 3072), 5, True),
    "qwen3-1.7b": PairShape(_qwen3(2048, 28, 16, 6144), 5, True),
    "qwen3-4b": PairShape(_qwen3(2560, 36, 32, 9728), 5, True),
    "qwen3-8b": PairShape(_qwen3(4096, 36, 32, 12288), 5, False),
    "micro-hybrid": PairShape(
        _hybrid(TransformerDims(512, 64, 8, 4, 2, 16, 128, 1e-6, 1e4, 2048), 2, 4, 16), 2, True, 8
    ),
    "qwen3.5-9b": PairShape(_hybrid(_QWEN3_5, 16, 32, 128), 5, False),
}


def find_shape(name: str) -> PairShape:
    """The shape of that name. Raises UsageError listing the known ones."""
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]


def random_torch_engine(
    name: str, shape: PairShape, precision: PrecisionName, limits: Limits, device: torch.device, seed: int = 0
) -> tuple[TorchEngine, dict[str, Tensor]]:
    """An engine of that shape, and its weights by the names of `weight_layout`."""
    made = {"backend": "torch", "precision": precision}
    manifest = bare_manifest(f"random-{name}", shape.target, shape.drafter, limits, **made)
    weights = _random_weights(shape, DTYPES[precision], device, seed)
    return TorchEngine(manifest, weights, device), weights


def _random_weights(shape: PairShape, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for weight in stored_weights(shape.target, shape.drafter, target_tied=shape.tied, drafter_tied=shape.tied):
        own = getattr(torch, weight.dtype) if weight.dtype else dtype
        tensor = torch.empty(weight.shape, dtype=own, device=device)
        if weight.name.endswith(".decay"):
            tensor.fill_(-0.05)
        elif weight.name == f"{TARGET}norm":
            # Random signs before the head: else a token's own embedding, still in the residual stream, would win.
            tensor.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        elif weight.sources[0].endswith(BIAS):
            tensor.fill_(0)
        elif len(weight.shape) == 1:
            tensor.fill_(1)
        else:
            table = weight.name in (f"{TARGET}embedding", f"{TARGET}head")
            tensor.normal_(0, (LOGIT_STD if table else 1.0) * weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = tensor
    return weights
