"""A random pair of a published shape as a PyTorch engine, made on the device: for round times on a GPU.

No checkpoint is written, so that a full-size pair is there in seconds. What it says means nothing: it is reached from
`tools/gpu_bench.py` and from nowhere else, and no engine directory can hold one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_trt import __version__
from ddtree_trt.artifact import SCHEMA_VERSION, CheckpointIdentity, Limits, Manifest
from ddtree_trt.bench.random_pair import LOGIT_STD, PairShape
from ddtree_trt.build.backend import PrecisionName
from ddtree_trt.runtime.torch import TorchEngine
from ddtree_trt.runtime.torch_weights import DTYPES
from ddtree_trt.weight_layout import TARGET, stored_weights

_NOBODY = CheckpointIdentity("random", "random", "")


def random_torch_engine(
    name: str, shape: PairShape, precision: PrecisionName, limits: Limits, device: torch.device, seed: int = 0
) -> tuple[TorchEngine, dict[str, Tensor]]:
    """An engine of that shape, and its weights by the names of `weight_layout`."""
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        product_version=__version__,
        backend="torch",
        precision=precision,
        name=f"random-{name}",
        target=_NOBODY,
        drafter=_NOBODY,
        drafter_kind="dflash",
        target_dims=shape.target,
        drafter_dims=shape.drafter,
        limits=limits,
        stop_token_ids=(),
        chat_template_args={},
        toolchain={"torch": torch.__version__},
        tensors={},
        files={},
        build_seconds=0.0,
    )
    weights = random_weights(shape, DTYPES[precision], device, seed)
    return TorchEngine(manifest, weights, device), weights


def random_weights(shape: PairShape, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Weights scaled so that states keep their size and logits are about as peaked as a trained network's; else trees
    would have shapes that no real one has."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for weight in stored_weights(shape.target, shape.drafter, target_tied=shape.tied, drafter_tied=shape.tied):
        tensor = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.name == f"{TARGET}norm":
            # Random signs before the head: else a token's own embedding, still in the residual stream, would win.
            tensor.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        elif len(weight.shape) == 1:
            tensor.fill_(1)
        else:
            table = weight.name in (f"{TARGET}embedding", f"{TARGET}head")
            tensor.normal_(0, (LOGIT_STD if table else 1.0) * weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = tensor
    return weights
