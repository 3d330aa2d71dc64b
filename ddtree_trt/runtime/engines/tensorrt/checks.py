"""Checks of this machine against the one a TensorRT engine was built for, made before anything is deserialised.

A plan is native code for one TensorRT version and one kind of GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree_trt import plugins
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.device.cuda_calls import cuda_bindings, cuda_versions, current_gpu
from ddtree_trt.device.tensorrt_library import import_tensorrt
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.plugins import library


def check_machine(directory: Path, manifest: Manifest) -> tuple[Any, Any, Path]:
    """The modules `tensorrt` and `cuda.bindings.runtime` and the plugin library, after all checks.

    Raises MissingDependency for what is not installed, and ArtifactError, which names the difference and what to do.
    """
    version = manifest.toolchain.get("tensorrt", "of an unknown version")
    refusal = f"{directory} was built with TensorRT {version}, which cannot be imported here"
    trt, cuda = import_tensorrt(refusal), cuda_bindings()
    check_toolchain(directory, manifest, trt.__version__, cuda)
    return trt, cuda, check_plugins(directory, manifest)


def check_toolchain(directory: Path, manifest: Manifest, tensorrt: str, cuda: Any) -> None:
    """Compare TensorRT, CUDA, the driver and the GPU with the engine's. Raises ArtifactError with the
    difference."""
    built, rebuild = manifest.toolchain, f"rebuild with: {rebuild_command(directory, manifest)}"

    def refuse(what: str, expected: str, found: str) -> ArtifactError:
        return ArtifactError(f"{directory} was built for {what} {expected}, found {found}; {rebuild}")

    if built.get("tensorrt") != tensorrt:
        raise refuse("TensorRT", built.get("tensorrt", "unknown"), tensorrt)
    # Before any call of TensorRT's runtime, which may end the process where no driver is installed.
    try:
        gpu = current_gpu(cuda)
    except EngineError as error:
        raise refuse("a GPU of", f"sm_{built.get('sm')}", f"none that CUDA can use ({error})") from error
    if gpu is None:
        raise refuse("a GPU of", f"sm_{built.get('sm')}", "none")
    if built.get("sm") != str(gpu.sm):
        expected = f"sm_{built.get('sm')} ({built.get('gpu', 'unknown')})"
        raise refuse("a GPU of", expected, f"sm_{gpu.sm} ({gpu.name})")
    versions, major = cuda_versions(cuda), built.get("cuda", "0").split(".")[0]
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
