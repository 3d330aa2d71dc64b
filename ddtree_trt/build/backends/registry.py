"""The backends by name, and the choice of precision. A backend is imported when it is used."""

from __future__ import annotations

from typing import Literal

from ddtree_trt.artifact.precisions import BackendName, PrecisionName
from ddtree_trt.build.backends.base import BackendBuild, BuilderOptions
from ddtree_trt.errors import UsageError


def backend_build(
    name: Literal["auto", BackendName], options: BuilderOptions, *, dry_run: bool = False
) -> BackendBuild:
    """The named backend; `auto` is ONNX Runtime, which runs everywhere. For a dry run any machine will do.

    Raises MissingDependency where its packages are not installed, BuildError where this machine cannot build it, and
    UsageError for options that are not for it.
    """
    options.check("onnxruntime" if name == "auto" else name)
    if name in ("auto", "onnxruntime"):
        from ddtree_trt.build.backends.onnxruntime.backend import OnnxRuntimeBuild

        return OnnxRuntimeBuild()
    if name == "torch":
        from ddtree_trt.build.backends.torch.backend import TorchBuild

        return TorchBuild()
    if name == "tensorrt-rtx":
        from ddtree_trt.build.backends.tensorrt.rtx import RtxBuild

        rtx = RtxBuild(options)
        if not dry_run:
            _ = rtx.module  # raises where it is not installed, before any work
        return rtx
    from ddtree_trt.build.backends.tensorrt.backend import TensorRtBuild

    build = TensorRtBuild(options)
    if not dry_run:
        _ = build.machine  # raises where this machine cannot build, before any work
    return build


def resolve_precision(backend: BackendBuild, wanted: Literal["auto", PrecisionName]) -> PrecisionName:
    """The precision to compute in. Raises UsageError when the backend does not have it."""
    if wanted == "auto":
        return backend.precisions[0]
    if wanted not in backend.precisions:
        known = ", ".join(backend.precisions)
        raise UsageError(
            f"precision {wanted!r} is not available: the {backend.name} backend computes in {known}; "
            f"use --precision {backend.precisions[0]}"
        )
    return wanted
