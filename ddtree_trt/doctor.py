"""Diagnosis of this machine: what is installed, what each part enables, and the next command for what is missing.
Imports nothing that is slow to load."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from ddtree_trt import __version__
from ddtree_trt.artifact.backends import ONNXRUNTIME, TENSORRT, TENSORRT_RTX, TORCH
from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.choice import choose_backend
from ddtree_trt.device.cpu import Cpu, read_cpu
from ddtree_trt.device.gpus import Gpu, available_bytes
from ddtree_trt.device.memory import plan_manifest
from ddtree_trt.device.survey import CUDA, CUDA_PYTHON, DRIVER, Survey, survey_machine
from ddtree_trt.errors import ArtifactError, install_with
from ddtree_trt.plugins import ABI, library

_ONNXRUNTIMES = (ONNXRUNTIME.name, f"{ONNXRUNTIME.name}-gpu")  # one of them
_PACKAGES = (
    *("numpy", "onnx", *_ONNXRUNTIMES, "safetensors", "transformers", "tokenizers", "huggingface_hub", "typer", "rich"),
    *(TORCH.name, TENSORRT.name, TENSORRT_RTX.name, "cuda-python", "tritonclient"),
)
_RTX_USE = f"building {TENSORRT_RTX.name} engines, without a GPU too, and running them"

_NEW_DRIVER = (
    f"sudo apt-get install nvidia-driver-{DRIVER}-open, and restart (Ubuntu; others: https://www.nvidia.com/drivers; "
    "in a container the host's driver counts: start it with --gpus all)"
)
_NVCC = (
    "sudo apt-get install cuda-toolkit-13-0, and put /usr/local/cuda/bin on PATH (NVIDIA's repository: "
    "https://developer.nvidia.com/cuda-downloads)"
)
_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_FOR_ANOTHER = "ddtree-trt build --target qwen3-8b --backend tensorrt-rtx --gpu sm89 (builds here, for another machine)"


@dataclass(frozen=True)
class Check:
    """One part of the installation: whether it was found, its version or place, and what it is for."""

    name: str
    found: bool
    detail: str
    enables: str
    next: str | None = None  # what to do where it is missing; None where nothing of use can be done here


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
    backend: str  # what `build --backend auto` would take, and why

    @property
    def next_steps(self) -> Mapping[str, str]:
        """Command → the names of what is missing without it, in the order of the checks."""
        names: dict[str, list[str]] = {}
        for check in self.checks:
            if check.next and not check.found:
                names.setdefault(check.next, []).append(check.name)
        return {command: ", ".join(missing) for command, missing in names.items()}


def diagnose(survey: Survey | None = None) -> Diagnosis:
    """The diagnosis of this machine, or of one with the findings of `survey`. What is missing or broken is a finding;
    nothing is raised for it."""
    survey = survey or survey_machine(import_modules=False)
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=installed_versions(*_PACKAGES),
        cpu=read_cpu(),
        gpus=survey.gpus,
        checks=(
            _check_native(),
            _check_onnxruntime(),
            _check_gpu(survey),
            _check_driver(survey),
            _check_torch(survey),
            *_check_packages(survey),
            _check_nvcc(survey),
            *_check_plugins(survey),
            *_check_engine(survey.gpus),
        ),
        backend=choose_backend(survey).reason,
    )


def _check_native() -> Check:
    spec = importlib.util.find_spec("ddtree_trt._native")
    install = f"{install_with()} (needs a C++17 compiler)"
    use = "running any engine: trees and cache compaction in C++"
    return Check("native module", spec is not None, str(spec.origin) if spec else "not built", use, install)


def _check_onnxruntime() -> Check:
    versions, name = installed_versions(*_ONNXRUNTIMES), ONNXRUNTIME.name
    use = f"the {name} backend: engines on the CPU"
    return Check(name, bool(versions), _listing(versions) or "not installed", use, f"pip install {name}")


def _check_gpu(survey: Survey) -> Check:
    detail = ", ".join(f"{g} with {g.memory}, driver {g.driver}" for g in survey.gpus)
    use = "the torch, tensorrt and tensorrt-rtx backends"
    return Check("NVIDIA GPU", bool(survey.gpus), detail or survey.no_gpu, use, _FOR_ANOTHER)


def _check_driver(survey: Survey) -> Check:
    use, update = "running anything on the GPU", _NEW_DRIVER if survey.gpus else None
    if survey.driver_cuda is None:
        return Check("CUDA driver", False, "no libcuda.so.1", use, update)
    detail = f"libcuda.so.1, for CUDA up to {survey.driver_cuda}"
    if not survey.driver_runs():
        detail += (
            f"; our kernels carry the runtime of CUDA {CUDA}, which needs driver {DRIVER} or newer, also beside a "
            "torch for CUDA 12"
        )
    return Check("CUDA driver", survey.driver_runs(), detail, use, update)


def _check_torch(survey: Survey) -> Check:
    versions = survey.versions.get(TORCH.modules[0], {})
    for_cpus = bool(versions and survey.gpus and not survey.torch_cuda)
    detail = (_listing(versions) or "not installed") + (", a build for CPUs" if for_cpus else "")
    install = _TORCH if for_cpus else install_with(TORCH.extra)
    return Check(TORCH.name, bool(versions) and not for_cpus, detail, f"the {TORCH.name} backend", install)


def _check_packages(survey: Survey) -> tuple[Check, ...]:
    """NVIDIA's packages. TensorRT builds on its GPU alone, TensorRT for RTX on any machine."""
    served = not survey.gpus or any(gpu.sm in TENSORRT_RTX.sms for gpu in survey.gpus)
    rtx = install_with(TENSORRT_RTX.extra) if served else None
    full = install_with(TENSORRT.extra) if survey.gpus else None
    rows = (
        (TENSORRT.title, TENSORRT.modules[0], "building and running tensorrt engines", full),
        (TENSORRT_RTX.title, TENSORRT_RTX.modules[0], _RTX_USE, rtx),
        ("CUDA for Python", CUDA_PYTHON, "memory and graphs of tensorrt and tensorrt-rtx engines", _cuda(survey, rtx)),
    )
    return tuple(
        Check(name, bool(versions), _listing(versions) or "not installed", use, install)
        for name, module, use, install in rows
        for versions in [survey.versions.get(module, {})]
    )


def _cuda(survey: Survey, rtx: str | None) -> str | None:
    """Both extras have it: by that of the package that is there, else by the one for this GPU."""
    if not survey.gpus:
        return None
    return rtx if rtx and not survey.version(TENSORRT.modules[0]) else install_with(TENSORRT.extra)


def _check_nvcc(survey: Survey) -> Check:
    use = "compiling the CUDA kernels and the plugin library"
    return Check("nvcc", survey.nvcc is not None, survey.nvcc or "not on PATH", use, _NVCC if survey.gpus else None)


def _check_plugins(survey: Survey) -> tuple[Check, ...]:
    """Whether each native library is built, with the ABI of this version."""
    uses = {
        library.PLUGINS: "tree attention and cache compaction in tensorrt engines",
        library.TORCH: "tree attention and cache compaction in the torch backend",
    }
    build = library.BUILD_HINT if survey.gpus else None
    return tuple(
        Check(name, name in survey.libraries, _library_detail(name, name in survey.libraries), use, build)
        for name, use in uses.items()
    )


def _library_detail(name: str, current: bool) -> str:
    path = library.library_path(name)
    if current:
        return f"{path}, plugin ABI {ABI}"
    if not path.is_file():
        return "not built"
    abi = library.abi_of(path) if path.stat().st_size else None
    return f"{path}, plugin ABI {abi}, this version needs {ABI}"


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


def _listing(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
