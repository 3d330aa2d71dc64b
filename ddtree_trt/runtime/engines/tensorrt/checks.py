"""Checks of this machine against the one a TensorRT engine was built for, made before anything is deserialised.

A plan is code for one version of TensorRT or of TensorRT for RTX and for some kinds of GPU: of TensorRT for the one it
was built on, of TensorRT for RTX for those it was built for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt import plugins
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.device.cuda_calls import CurrentGpu, cuda_bindings, cuda_versions, current_gpu
from ddtree_trt.device.rtx_kinds import KINDS, UNSERVED
from ddtree_trt.device.tensorrt_library import import_tensorrt
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.plugins import library


@dataclass(frozen=True)
class Installed:
    """What an engine needs of this machine."""

    trt: Any  # the module `tensorrt`, or that of TensorRT for RTX
    cuda: Any  # the module `cuda.bindings.runtime`
    plugins: Path | None  # the plugin library; None for native attention


def check_machine(directory: Path, manifest: Manifest) -> Installed:
    """What the engine needs, after all checks.

    Raises MissingDependency for what is not installed, and ArtifactError, which names the difference and what to do.
    """
    backend = BACKENDS[manifest.backend]
    version = manifest.toolchain.get(manifest.backend, "of an unknown version")
    refusal = f"{directory} was built with {backend.title} {version}, which cannot be imported here"
    trt = import_tensorrt(refusal, rtx=backend.portable)
    cuda = cuda_bindings(backend.extra)
    check_toolchain(directory, manifest, trt.__version__, cuda)
    return Installed(trt, cuda, None if manifest.plugin is None else check_plugins(directory, manifest))


def check_toolchain(directory: Path, manifest: Manifest, version: str, cuda: Any) -> None:
    """Compare TensorRT's `version`, CUDA, the driver and the GPU with the engine's. Raises ArtifactError with the
    difference."""
    built, backend = manifest.toolchain, BACKENDS[manifest.backend]

    def refuse(what: str, expected: str, found: str, gpu: CurrentGpu | None = None) -> ArtifactError:
        kind = "" if gpu is None else f"sm{gpu.sm}"
        if backend.portable and kind and kind not in KINDS:
            advice = f"which {UNSERVED.get(kind, f'{backend.title} does not serve')}"
        else:
            advice = f"rebuild with: {rebuild_command(directory, manifest, *filter(None, [kind]))}"
        return ArtifactError(f"{directory} was built for {what} {expected}, found {found}; {advice}")

    if built.get(manifest.backend) != version:
        raise refuse(backend.title, built.get(manifest.backend, "unknown"), version)
    if backend.portable:
        wanted = built.get("gpus", "").split()
        expected = " or ".join(wanted) or "an unknown kind"
    else:
        wanted = [f"sm{built.get('sm')}"]
        expected = f"sm_{built.get('sm')} ({built.get('gpu', 'unknown')})"
    # Before any call of TensorRT's runtime, which may end the process where no driver is installed.
    try:
        gpu = current_gpu(cuda)
    except EngineError as error:
        raise refuse("a GPU of", expected, f"none that CUDA can use ({error})") from error
    if gpu is None:
        raise refuse("a GPU of", expected, "none")
    if f"sm{gpu.sm}" not in wanted:
        raise refuse("a GPU of", expected, f"sm_{gpu.sm} ({gpu.name})", gpu)
    versions = cuda_versions(cuda)
    major = built.get("cuda", versions.runtime).split(".")[0]  # TensorRT for RTX may be built for without CUDA
    if versions.runtime.split(".")[0] != major:
        raise refuse("CUDA", f"{major}.x", versions.runtime)
    if int(versions.driver.split(".")[0]) < int(major):
        raise ArtifactError(
            f"{directory} needs a driver for CUDA {major}, found one for CUDA {versions.driver}; "
            "install a newer NVIDIA driver"
        )


def check_plugins(directory: Path, manifest: Manifest) -> Path:
    """The plugin library, of the ABI the engine was built with. Raises MissingDependency or ArtifactError.

    Libraries with the same ABI number agree on a plan's plugins: their tensors, attributes, stored fields and
    workspace. Another build of the same ABI, by another compiler or for more GPUs, has another sha256 and is accepted;
    the manifest's sha256 records the library of the build.
    """
    built, rebuild = manifest.plugin or {}, f"rebuild with: {rebuild_command(directory, manifest)}"
    for field, found in plugins.IDENTITY.items():
        if built.get(field) != found:
            raise ArtifactError(
                f"{directory} was built with plugin {field} {built.get(field)!r}, this ddtree-trt has {found!r}; "
                f"{rebuild}"
            )
    return library.find(library.PLUGINS)
