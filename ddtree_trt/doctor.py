"""Diagnosis of this machine: what is installed, and what each part enables. Imports nothing that is slow to load."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddtree_trt import __version__
from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.device.cpu import Cpu, read_cpu
from ddtree_trt.device.cuda_calls import cuda_of_driver
from ddtree_trt.device.gpus import Gpu, available_bytes, find_gpus
from ddtree_trt.device.memory import plan_manifest
from ddtree_trt.errors import ArtifactError, EngineError, install_with
from ddtree_trt.isolation import isolated
from ddtree_trt.plugins import ABI, library

_PACKAGES = (
    *("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "safetensors", "transformers", "tokenizers"),
    *("huggingface_hub", "typer", "rich", "torch", "tensorrt", "cuda-python", "tritonclient"),
)
# One of these is enough: the name of TensorRT's package depends on the CUDA release.
_TENSORRT = ("tensorrt", "tensorrt_cu13", "tensorrt_cu13_bindings", "tensorrt_cu12", "tensorrt_cu12_bindings")
_CUDA_PYTHON = ("cuda-python", "cuda-bindings")

_FLASH = ("flash-attn",)
_FLASH_TIMEOUT_S = 60
# The kernels link CUDA's runtime statically, whatever CUDA the installed torch was built for.
KERNELS_CUDA, KERNELS_DRIVER = 13, 580


@dataclass(frozen=True)
class Check:
    """One part of the installation: whether it was found, its version or place, and what it is for."""

    name: str
    found: bool
    detail: str
    enables: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything `ddtree-trt doctor` prints."""

    version: str
    python: str
    platform: str
    packages: dict[str, str]  # installed ones only
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    checks: tuple[Check, ...]


def diagnose() -> Diagnosis:
    """The diagnosis of this machine. What is missing or broken is a finding; nothing is raised for it."""
    cpu, gpus = read_cpu(), find_gpus()
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=installed_versions(*_PACKAGES),
        cpu=cpu,
        gpus=gpus,
        checks=(
            _check_native(),
            _check_onnxruntime(),
            _check_gpu(gpus),
            *_check_gpu_software(),
            *_check_plugins(),
            *_check_engine(gpus),
        ),
    )


def _check_native() -> Check:
    spec = importlib.util.find_spec("ddtree_trt._native")
    detail = str(spec.origin) if spec else f"not built; {install_with()} (needs a C++17 compiler)"
    return Check("native module", spec is not None, detail, "running any engine: trees and cache compaction in C++")


def _check_onnxruntime() -> Check:
    versions = installed_versions("onnxruntime", "onnxruntime-gpu")
    detail = _listing(versions) or "not installed; run: pip install onnxruntime"
    return Check("onnxruntime", bool(versions), detail, "the onnxruntime backend: engines on the CPU")


def _check_gpu(gpus: tuple[Gpu, ...]) -> Check:
    detail = ", ".join(f"{g.name} ({g.memory}, sm {g.compute_capability}, driver {g.driver})" for g in gpus)
    return Check("NVIDIA GPU", bool(gpus), detail or "none found", "the torch and tensorrt backends")


def _check_gpu_software() -> tuple[Check, ...]:
    torch, full, cuda = (installed_versions(*names) for names in (("torch",), _TENSORRT, _CUDA_PYTHON))
    nvcc, driver = shutil.which("nvcc"), cuda_of_driver()
    return (
        _check_driver(driver),
        Check("torch", bool(torch), _listing(torch) or f"not installed; {install_with('torch')}", "the torch backend"),
        _check_flash(),
        Check(
            "TensorRT",
            bool(full),
            _listing(full) or f"not installed; {install_with('tensorrt')}",
            "building and running tensorrt engines",
        ),
        Check(
            "CUDA for Python",
            bool(cuda),
            _listing(cuda) or f"not installed; {install_with('tensorrt')}",
            "memory and graphs of tensorrt engines",
        ),
        Check("nvcc", nvcc is not None, nvcc or "not on PATH", "compiling the CUDA kernels and the plugin library"),
    )


def _check_driver(newest_cuda: str | None) -> Check:
    use = "running anything on the GPU"
    if newest_cuda is None:
        return Check("CUDA driver", False, "no libcuda.so.1", use)
    detail = f"libcuda.so.1, for CUDA up to {newest_cuda}"
    new_enough = int(newest_cuda.split(".")[0]) >= KERNELS_CUDA
    if not new_enough:
        detail += (
            f"; our kernels carry the runtime of CUDA {KERNELS_CUDA}, which needs driver {KERNELS_DRIVER} or newer, "
            "also beside a torch for CUDA 12"
        )
    return Check("CUDA driver", new_enough, detail, use)


def _check_flash() -> Check:
    """Whether flash-attn can be imported, tried in a process of its own: a wheel for another torch may end it."""
    use = "prefill and the drafter's block in the torch backend; without it our own kernels do them"
    found = installed_versions(*_FLASH)
    if not found:
        return Check("flash-attn", False, "not installed, and not needed", use)
    try:
        command = isolated("from flash_attn import flash_attn_with_kvcache")
        run = subprocess.run(command, capture_output=True, text=True, timeout=_FLASH_TIMEOUT_S)
        status, errors = run.returncode, run.stderr.strip().splitlines()
    except (EngineError, OSError, subprocess.SubprocessError) as error:
        status, errors = 1, [str(error)]
    detail = _listing(found)
    if status:
        detail += f", which cannot be imported ({errors[-1] if errors else f'exit status {status}'}): it is left out"
    return Check("flash-attn", not status, detail, use)


def _check_plugins() -> tuple[Check, ...]:
    uses = {
        library.PLUGINS: "tree attention in tensorrt engines",
        library.KERNELS: "cache compaction in tensorrt engines",
        library.TORCH: "tree attention and cache compaction in the torch backend",
    }
    return tuple(_check_library(library.FOLDER / name, use) for name, use in uses.items())


def _check_library(path: Path, use: str) -> Check:
    """The check of a native library, which counts as found when its ABI is this version's."""
    abi = library.abi_of(path) if path.is_file() and path.stat().st_size else None
    detail = f"{path}, plugin ABI {abi}" if path.is_file() else f"not built; {library.BUILD_HINT}"
    if path.is_file() and abi != ABI:
        detail += f", this version needs {ABI}; {library.BUILD_HINT}"
    return Check(path.name, abi == ABI, detail, use)


def _check_engine(gpus: tuple[Gpu, ...]) -> tuple[Check, ...]:
    """Whether the newest engine under `engines/` fits into the memory it would run in; nothing where there is none."""
    try:
        directory = newest_engine()
        plan = plan_manifest(load_manifest(directory))
    except ArtifactError:
        return ()
    available = available_bytes(plan.place, gpus)
    found = f"{available / 1e9:.1f} GB are there" if available else "no GPU whose memory is known"
    detail = f"{directory} takes about {plan.total_bytes / 1e9:.2f} GB on the {plan.place}; {found}"
    fits = available is not None and plan.total_bytes <= available
    return (Check("newest engine", fits, detail, "ddtree-trt run without naming an engine"),)


def _listing(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
