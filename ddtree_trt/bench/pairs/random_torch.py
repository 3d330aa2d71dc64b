"""A random pair of a published shape as a PyTorch engine, made on the device: for round times on a GPU.

No checkpoint is written, so that a full-size pair is ready in seconds. Its text means nothing: only
`bench --random-weights SHAPE --backend torch` and `tools/gpu/bench.py` make one, and no engine directory can hold it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import SCHEMA_VERSION, CheckpointIdentity, Limits, Manifest
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.weight_layout import TARGET, stored_weights
from ddtree_trt.bench.pairs.random_pair import LOGIT_STD, PairShape, find_shape, random_limits, write_tokenizer
from ddtree_trt.bench.session import Session
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.build.backends.torch.backend import TorchBuild
from ddtree_trt.build.choice import resolve_precision
from ddtree_trt.build.compile import PrecisionChoice
from ddtree_trt.device.gpus import available_bytes
from ddtree_trt.device.memory import plan_engine
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import BIAS
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.weights import DTYPES, choose_device, device_name

_NO_CHECKPOINT = CheckpointIdentity("random", "random", "")


def random_session(settings: BenchSettings, folder: Path) -> Session:
    """A session with the pair of shape `settings.engine` on the GPU, or where there is none on the CPU; `folder`, which
    is empty, becomes its directory. Raises UsageError for an unknown shape, a precision the device does not have, or a
    pair too large for its free memory."""
    shape, device = find_shape(settings.engine), choose_device()
    if device.type == "cpu" and settings.threads:
        torch.set_num_threads(settings.threads)
    precision = resolve_precision(TorchBuild(on_gpu=device.type == "cuda"), cast("PrecisionChoice", settings.precision))
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("precision fp16 is for GPUs, and no GPU was found; use --precision fp32 or bf16")
    engine, _ = random_torch_engine(
        settings.engine, shape, precision, random_limits(settings, shape), device, settings.seed
    )
    write_tokenizer(folder)
    return Session(folder, engine=engine)


def random_torch_engine(
    name: str, shape: PairShape, precision: PrecisionName, limits: Limits, device: torch.device, seed: int = 0
) -> tuple[TorchEngine, dict[str, Tensor]]:
    """An engine of that shape, and its weights by the names of `weight_layout`. Raises UsageError for one that is too
    large for the device."""
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        product_version=__version__,
        backend="torch",
        precision=precision,
        name=f"random-{name}",
        target=_NO_CHECKPOINT,
        drafter=_NO_CHECKPOINT,
        drafter_kind=kind_of(shape.drafter).name,
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
    _check_memory(manifest, shape, device)
    weights = random_weights(shape, DTYPES[precision], device, seed)
    return TorchEngine(manifest, weights, device), weights


def _check_memory(manifest: Manifest, shape: PairShape, device: torch.device) -> None:
    m = manifest
    stored = stored_weights(shape.target, shape.drafter, target_tied=shape.tied, drafter_tied=shape.tied)
    weights = sum(math.prod(w.shape) for w in stored) * DTYPES[m.precision].itemsize
    needed = plan_engine("torch", m.precision, shape.target, shape.drafter, m.limits, weights).total_bytes
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes("host", ())
    if available is not None and needed > available:
        raise UsageError(
            f"{m.name} in {m.precision} takes about {needed / 1e9:.1f} GB, and {device_name(device)} has "
            f"{available / 1e9:.1f} GB; choose a smaller shape"
        )


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
        elif weight.sources[0].endswith(BIAS):
            tensor.fill_(0)
        elif len(weight.shape) == 1:
            tensor.fill_(1)
        else:
            table = weight.name in (f"{TARGET}embedding", f"{TARGET}head")
            tensor.normal_(0, (LOGIT_STD if table else 1.0) * weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = tensor
    return weights
