"""Diagnosis of this machine: what is installed, what each part enables, and the next command for what is missing; and
the report on an engine directory. Imports nothing that is slow to load."""

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_trt import __version__
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import BACKENDS, ONNXRUNTIME, TENSORRT, TENSORRT_RTX, TORCH
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.choice import choose_backend
from ddtree_trt.device.cpu import Cpu, read_cpu
from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.memory import MemoryPlan, plan_manifest
from ddtree_trt.device.survey import CUDA, CUDA_PYTHON, DRIVER, Survey, survey_machine
from ddtree_trt.errors import DDTreeError, MissingDependency, install_with
from ddtree_trt.plugins import ABI, library
from ddtree_trt.runtime.decoding.routing import engine_host_reason

_ONNXRUNTIMES = (ONNXRUNTIME.name, f"{ONNXRUNTIME.name}-gpu")  # one of them
_PACKAGES = (
    *("numpy", "onnx", *_ONNXRUNTIMES, "safetensors", "transformers", "tokenizers", "huggingface_hub", "typer", "rich"),
    *(TORCH.name, TENSORRT.name, TENSORRT_RTX.name, "cuda-python", "tritonclient"),
)
_NEW_DRIVER = (
    f"sudo apt-get install nvidia-driver-{DRIVER}-open, and restart (Ubuntu; others: https://www.nvidia.com/drivers; "
    "in a container the host's driver counts: start it with --gpus all)"
)
_OLD_DRIVER = (
    f"; our kernels carry the runtime of CUDA {CUDA}, which needs driver {DRIVER} or newer, also beside a torch for "
    "CUDA 12"
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
        checks=tuple(_checks(survey)),
        backend=choose_backend(survey).reason,
    )


def _checks(survey: Survey) -> Iterator[Check]:
    gpus = survey.gpus

    def installed(name: str, module: str, use: str, install: str | None) -> Check:
        versions = survey.versions.get(module, {})
        return Check(name, bool(versions), _listing(versions) or "not installed", use, install)

    try:
        from ddtree_trt import _native

        native, problem = str(_native.__file__), ""
    except MissingDependency as error:
        native, problem = "", str(error)
    use, install = "running any engine: trees and cache compaction in C++", f"{install_with()} (needs a C++17 compiler)"
    yield Check("native module", not problem, native or problem, use, install)
    versions, name = installed_versions(*_ONNXRUNTIMES), ONNXRUNTIME.name
    use = f"the {name} backend: engines on the CPU"
    yield Check(name, bool(versions), _listing(versions) or "not installed", use, f"pip install {name}")

    detail = ", ".join(f"{g} with {g.memory}, driver {g.driver}" for g in gpus)
    use = "the torch, tensorrt and tensorrt-rtx backends"
    yield Check("NVIDIA GPU", bool(gpus), detail or survey.no_gpu, use, _FOR_ANOTHER)
    runs, detail = survey.driver_runs(), "no libcuda.so.1"
    if survey.driver_cuda is not None:
        detail = f"libcuda.so.1, for CUDA up to {survey.driver_cuda}" + ("" if runs else _OLD_DRIVER)
    yield Check("CUDA driver", runs, detail, "running anything on the GPU", _NEW_DRIVER if gpus else None)

    # NVIDIA's packages. TensorRT builds on its GPU alone, TensorRT for RTX on any machine. Both extras have CUDA for
    # Python: it comes by that of the package that is there, else by the one for this GPU.
    torch = installed(TORCH.name, TORCH.modules[0], f"the {TORCH.name} backend", install_with(TORCH.extra))
    if torch.found and gpus and not survey.torch_cuda:
        torch = replace(torch, found=False, detail=f"{torch.detail}, a build for CPUs", next=_TORCH)
    yield torch
    full, served = install_with(TENSORRT.extra), not gpus or any(gpu.sm in TENSORRT_RTX.sms for gpu in gpus)
    rtx = install_with(TENSORRT_RTX.extra) if served else None
    cuda = rtx if rtx and not survey.version(TENSORRT.modules[0]) else full
    use = "building and running tensorrt engines"
    yield installed(TENSORRT.title, TENSORRT.modules[0], use, full if gpus else None)
    use = "building tensorrt-rtx engines, without a GPU too, and running them"
    yield installed(TENSORRT_RTX.title, TENSORRT_RTX.modules[0], use, rtx)
    use = "memory and graphs of tensorrt and tensorrt-rtx engines"
    yield installed("CUDA for Python", CUDA_PYTHON, use, cuda if gpus else None)

    use = "compiling the CUDA kernels and the plugin library"
    yield Check("nvcc", survey.nvcc is not None, survey.nvcc or "not on PATH", use, _NVCC if gpus else None)
    for library_name, where in ((library.PLUGINS, "tensorrt engines"), (library.TORCH, "the torch backend")):
        use, found = f"tree attention and cache compaction in {where}", library_name in survey.libraries
        detail = _library_detail(library_name, found)
        yield Check(library_name, found, detail, use, library.BUILD_HINT if gpus else None)


def _library_detail(name: str, current: bool) -> str:
    path = library.library_path(name)
    if not (current or path.is_file()):
        return "not built"
    return f"{path}, plugin ABI {ABI if current else f'{library.abi_of(path)}, this version needs {ABI}'}"


def _listing(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


@dataclass(frozen=True)
class EngineReport:
    directory: str
    manifest: Manifest
    memory: MemoryPlan
    problem: str | None  # why it cannot run on this machine, as far as that is known without loading it
    total_bytes: int  # on disk
    has_profile: bool
    no_device_rounds: str | None  # why no request's rounds can stay on the device; None: those of fixed budgets can

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "memory": self.memory.to_dict()}


def inspect_engine(directory: Path, progress: Progress = no_progress) -> EngineReport:
    """Read an engine's manifest and verify every file of it. Raises ArtifactError."""
    manifest = load_manifest(directory)
    verify_files(directory, manifest, progress)
    problem = None
    if BACKENDS[manifest.backend].plans:
        from ddtree_trt.runtime.engines.tensorrt.opening import check_machine

        try:
            check_machine(directory, manifest)
        except DDTreeError as error:
            problem = str(error)
    return EngineReport(
        directory=str(directory),
        manifest=manifest,
        memory=plan_manifest(manifest),
        problem=problem,
        total_bytes=sum(entry.size for entry in manifest.files.values()),
        has_profile=(directory / artifact.PROFILE).is_file(),
        no_device_rounds=engine_host_reason(manifest),
    )
