"""Manifests of engines that no directory has."""

from __future__ import annotations

from typing import Any

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import SCHEMA_VERSION, CheckpointIdentity, Limits, Manifest
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims

_NO_CHECKPOINT = CheckpointIdentity("none", "none", "")


def bare_manifest(
    name: str, target: TransformerDims, drafter: TransformerDims, limits: Limits, **others: Any
) -> Manifest:
    """Of a pair without checkpoints, files and stop tokens; for ONNX Runtime in fp32 where `others` do not say it."""
    fields: dict[str, Any] = {key: {} for key in ("chat_template_args", "toolchain", "tensors", "files")}
    fields |= {"backend": "onnxruntime", "precision": "fp32", "stop_token_ids": (), "build_seconds": 0.0} | others
    return Manifest(
        schema_version=SCHEMA_VERSION,
        product_version=__version__,
        name=name,
        target=_NO_CHECKPOINT,
        drafter=_NO_CHECKPOINT,
        drafter_kind=kind_of(drafter).name,
        target_dims=target,
        drafter_dims=drafter,
        limits=limits,
        **fields,
    )
