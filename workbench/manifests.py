"""Manifests of engines that no directory has."""

from __future__ import annotations

from ddtree_trt import __version__
from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.artifact.manifest import SCHEMA_VERSION, CheckpointIdentity, Limits, Manifest
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims

_NO_CHECKPOINT = CheckpointIdentity("none", "none", "")


def bare_manifest(
    name: str,
    backend: BackendName,
    precision: PrecisionName,
    target: TransformerDims,
    drafter: DFlashDims,
    limits: Limits,
) -> Manifest:
    """Of a pair without checkpoints, files and stop tokens."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        product_version=__version__,
        backend=backend,
        precision=precision,
        name=name,
        target=_NO_CHECKPOINT,
        drafter=_NO_CHECKPOINT,
        drafter_kind="dflash",
        target_dims=target,
        drafter_dims=drafter,
        limits=limits,
        stop_token_ids=(),
        chat_template_args={},
        toolchain={},
        tensors={},
        files={},
        build_seconds=0.0,
    )
