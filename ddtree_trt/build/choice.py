"""The backend that `--backend auto` means: the best one that this machine can build, and run, this pair with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddtree_trt.artifact.precisions import BACKEND_PRECISIONS, PRECISIONS, BackendName, PrecisionName
from ddtree_trt.build.backends.tensorrt import rtx
from ddtree_trt.build.backends.tensorrt.machine import BELOW, LOWEST, sm_for_values
from ddtree_trt.build.outline import Pair
from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.rtx_kinds import KINDS
from ddtree_trt.device.survey import CUDA, CUDA_PYTHON, DRIVER, TENSORRT, TENSORRT_RTX, Survey
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import install_with
from ddtree_trt.plugins import HEAD_DIMS, LOWEST_SM, library

Wanted = Literal["auto", PrecisionName]

_LOWEST = f"the GPU's compute capability must be {LOWEST_SM / 10} or newer"
RTX_SMS = tuple(KINDS.values())
# From here on a CPU engine in float32 is slow, and 8-bit weights are worth a word.
LARGE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is that one: a line for the user."""

    backend: BackendName
    reason: str


@dataclass(frozen=True)
class Obstacle:
    """What a backend lacks."""

    text: str
    removable: bool = False  # by installing something


def choose_backend(survey: Survey, pair: Pair | None = None, precision: Wanted = "auto") -> Choice:
    """TensorRT where there is a GPU for it, else TensorRT for RTX, else PyTorch, else ONNX Runtime on the CPU.

    A backend that lacks anything on this machine, or that would refuse the pair or the precision, is left out. The
    reason names the best one that was left out, and what it lacks.
    """
    lacking = {name: o for name, find in _OBSTACLES.items() if (o := find(survey, pair, precision))}
    backend: BackendName = next((name for name in _OBSTACLES if name not in lacking), "onnxruntime")
    if survey.gpu is None:
        why = f"{survey.no_gpu}; an engine for a GPU needs one, and its driver {DRIVER} or newer (docs/gpu.md)"
    elif backend == "onnxruntime":
        why = f"nothing that computes on the {survey.gpu} is ready"
    else:
        why = f"{_SOFTWARE[backend]} {survey.version(_MODULES[backend])} and the {survey.gpu}"
    if survey.gpu and (better := _better_one(backend, survey.gpu, lacking)):
        why += f"; for {better}: {lacking[better].text}"
    if backend == "onnxruntime" and pair:
        why += _size_on_a_cpu(survey, pair, precision)
    return Choice(backend, f"backend {backend}: {why}")


def _better_one(chosen: BackendName, gpu: Gpu, lacking: Mapping[BackendName, Obstacle]) -> BackendName | None:
    """The backend to advise: the one made for this GPU, if something can be done for it, else one that can be had; None
    where the chosen one is as good."""
    made_for_it: BackendName = "tensorrt-rtx" if gpu.sm in RTX_SMS else "tensorrt"
    if chosen in (made_for_it, "tensorrt"):
        return None
    names = [name for name in (made_for_it, *lacking) if name in lacking and name != chosen]
    return next((name for name in names if lacking[name].removable), names[0])


def _size_on_a_cpu(survey: Survey, pair: Pair, precision: Wanted) -> str:
    """Words on a large target in float32: its bytes, those of the memory, and what 8-bit weights would take."""
    size = pair.weights_bytes("onnxruntime", "fp32")
    if precision not in ("auto", "fp32") or size < LARGE_BYTES:
        return ""
    memory = f" of this machine's {survey.host_bytes / 1e9:.1f} GB of memory" if survey.host_bytes else ""
    small = pair.weights_bytes("onnxruntime", "int8")
    return f"; in fp32 its weights take {size / 1e9:.1f} GB{memory}: --precision int8 makes that {small / 1e9:.1f} GB"


def _tensorrt(survey: Survey, pair: Pair | None, wanted: Wanted) -> Obstacle | None:
    return (
        _of_pair("tensorrt", survey, pair, wanted)
        or _of_capability(survey, lambda sm: sm >= LOWEST_SM, _LOWEST)
        or _of_fp8(survey, pair)
        or _of_driver(survey)
        or _of_packages(survey, "tensorrt", TENSORRT, CUDA_PYTHON)
        or _of_release(survey, TENSORRT, "tensorrt", LOWEST, BELOW)
    )


def _tensorrt_rtx(survey: Survey, pair: Pair | None, wanted: Wanted) -> Obstacle | None:
    served = ", ".join(str(sm / 10) for sm in RTX_SMS)
    return (
        _of_pair("tensorrt-rtx", survey, pair, wanted)
        or _of_capability(survey, RTX_SMS.__contains__, f"the GPU's compute capability must be one of {served}")
        or _of_fp8(survey, pair)
        or _of_driver(survey)
        or _of_packages(survey, "tensorrt-rtx", TENSORRT_RTX, CUDA_PYTHON)
        or _of_release(survey, TENSORRT_RTX, "tensorrt-rtx", rtx.LOWEST, rtx.BELOW)
    )


def _torch(survey: Survey, pair: Pair | None, wanted: Wanted) -> Obstacle | None:
    heads = {pair.target.dims.head_dim, pair.drafter.dims.head_dim} if pair else {*HEAD_DIMS}
    kernels = wanted != "fp32" and bool(heads & {*HEAD_DIMS})  # else its passes are PyTorch's alone
    return (
        _of_pair("torch", survey, pair, wanted)
        or (_of_capability(survey, lambda sm: sm >= LOWEST_SM, _LOWEST) if kernels else None)
        or _of_torch(survey)
        or (_of_kernels(survey) if kernels else None)
        or _of_driver(survey, survey.torch_cuda if survey.torch_cuda and not kernels else f"{CUDA}.0")
    )


# The backends for GPUs, the best first.
_OBSTACLES: Mapping[BackendName, Callable[[Survey, Pair | None, Wanted], Obstacle | None]] = {
    "tensorrt": _tensorrt,
    "tensorrt-rtx": _tensorrt_rtx,
    "torch": _torch,
}
_MODULES = {"tensorrt": TENSORRT, "tensorrt-rtx": TENSORRT_RTX, "torch": "torch"}
_SOFTWARE = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX", "torch": "PyTorch"}


def _of_pair(backend: BackendName, survey: Survey, pair: Pair | None, wanted: Wanted) -> Obstacle | None:
    """What no installation changes: no GPU, a precision the backend does not build, more weights than memory."""
    if survey.gpu is None:
        return Obstacle(survey.no_gpu)
    known = [p for p in BACKEND_PRECISIONS[backend] if backend == "torch" or PRECISIONS[p].half]
    half = "tensorrt" if backend == "tensorrt-rtx" else backend
    if pair and half not in (kind := kind_of(pair.drafter.dims)).halves:
        return Obstacle(f"{kind.title}s are not implemented for it")
    if backend != "torch" and pair and (pair.target.dims.experts or pair.drafter.dims.experts):
        return Obstacle("mixtures of experts are not implemented for it")
    if wanted != "auto" and wanted not in known:
        return Obstacle(f"the precision must be one of {', '.join(known)}, not {wanted}")
    precision = "bf16" if wanted == "auto" else wanted
    needed, available = pair.weights_bytes(backend, precision) if pair else 0, survey.gpu.memory_bytes
    if available is not None and needed > available:
        return Obstacle(
            f"the GPU must hold {needed / 1e9:.1f} GB of weights in {precision}, and it has {available / 1e9:.1f} GB"
        )
    return None


def _of_capability(survey: Survey, served: Callable[[int], bool], requirement: str) -> Obstacle | None:
    sm = survey.gpu.sm if survey.gpu else None
    if sm is None:
        return Obstacle("the GPU's compute capability must be known: install nvidia-smi", removable=True)
    return None if served(sm) else Obstacle(f"{requirement}, not {sm / 10}")


def _of_fp8(survey: Survey, pair: Pair | None) -> Obstacle | None:
    lowest = sm_for_values(pair.target.quantization) if pair else 0
    if survey.gpu and survey.gpu.sm and survey.gpu.sm < lowest:
        return Obstacle(f"a target in FP8 needs compute capability {lowest / 10}, not {survey.gpu.sm / 10}")
    return None


def _of_driver(survey: Survey, cuda: str = f"{CUDA}.0") -> Obstacle | None:
    if survey.driver_runs(cuda):
        return None
    found = f"this one is for CUDA {survey.driver_cuda}" if survey.driver_cuda else "libcuda.so.1 is not found"
    driver = f"must be {DRIVER} or newer" if cuda.startswith(f"{CUDA}.") else f"must be for CUDA {cuda}"
    return Obstacle(f"NVIDIA's driver {driver}, and {found}", removable=True)


def _of_torch(survey: Survey) -> Obstacle | None:
    if survey.torch_cuda:
        return None
    found = "torch is a build for CPUs" if survey.version("torch") else "torch is not installed"
    return Obstacle(f"{found}; {install_with('torch')}", removable=True)


def _of_kernels(survey: Survey) -> Obstacle | None:
    if library.TORCH in survey.libraries:
        return None
    return Obstacle(f"{library.TORCH} is not built; {library.BUILD_HINT}", removable=True)


def _of_packages(survey: Survey, extra: str, *modules: str) -> Obstacle | None:
    for module in modules:
        if not survey.version(module):
            return Obstacle(f"{module} is not installed; {install_with(extra)}", removable=True)
        if fault := survey.faults.get(module):
            return Obstacle(fault, removable=True)
    return None


def _of_release(
    survey: Survey, module: str, backend: BackendName, lowest: tuple[int, int], below: tuple[int, int]
) -> Obstacle | None:
    version = survey.version(module) or ""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if lowest <= tuple(numbers) < below:
        return None
    wanted = f"{'.'.join(map(str, lowest))} or newer below {below[0]}"
    return Obstacle(f"{_SOFTWARE[backend]} must be {wanted}, not {version}; {install_with(backend)}", removable=True)
