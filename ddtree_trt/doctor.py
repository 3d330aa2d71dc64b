"""What this machine has, and what each part of it enables. Nothing heavy is imported to find out."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddtree_trt import __version__
from ddtree_trt.artifact import installed_versions

_PACKAGES = (
    *("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "safetensors", "transformers", "tokenizers"),
    *("huggingface_hub", "typer", "rich", "torch", "tensorrt", "tritonclient"),
)
# One of these is enough: the name under which TensorRT comes depends on the CUDA release.
_TENSORRT = ("tensorrt", "tensorrt_cu13", "tensorrt_cu13_bindings", "tensorrt_cu12", "tensorrt_cu12_bindings")
_LEAN = ("tensorrt_lean", "tensorrt_lean_cu13_bindings", "tensorrt_lean_cu12_bindings")

# /proc/cpuinfo's words, by what they are good for. x86 names first, then Arm's.
_CPU_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16", "bf16"),
    "amx": ("amx_tile",),
    "neon": ("asimd",),
    "dotprod": ("asimddp",),
    "i8mm": ("i8mm",),
    "sve": ("sve",),
}
_GPU_QUERY = "name,driver_version,memory.total,compute_cap"
_GPU_TIMEOUT_S = 20


@dataclass(frozen=True)
class Check:
    """One part of the installation: is it there, what was seen of it, and what having it is for."""

    name: str
    found: bool
    detail: str
    enables: str


@dataclass(frozen=True)
class Cpu:
    model: str
    cores: int  # usable by this process
    features: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    memory: str
    compute_capability: str  # e.g. "9.0"


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
    """Look at this machine. Never raises for something that is missing or broken: that is a finding."""
    cpu, gpus = read_cpu(Path("/proc/cpuinfo")), find_gpus()
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=installed_versions(*_PACKAGES),
        cpu=cpu,
        gpus=gpus,
        checks=(_check_native(), _check_onnxruntime(), _check_gpu(gpus), *_check_gpu_software(), _check_plugins()),
    )


def read_cpu(cpuinfo: Path) -> Cpu:
    """Model and features from a /proc/cpuinfo; empty where there is none."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([^\t:\n]+?)\s*: (.*)$", text, re.MULTILINE))
    words = set((fields.get("flags") or fields.get("Features") or "").split())
    return Cpu(
        model=fields.get("model name", platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        features=tuple(name for name, any_of in _CPU_FEATURES.items() if words.intersection(any_of)),
    )


def find_gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs by nvidia-smi, or at least by the driver's files; empty without a driver."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
            rows = [[cell.strip() for cell in line.split(",")] for line in run.stdout.splitlines()]
            return tuple(Gpu(*row) for row in rows if len(row) == len(_GPU_QUERY.split(",")))
        except (OSError, subprocess.SubprocessError):
            pass  # installed, but no driver behind it: the files below say the same
    gpus = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        gpus.append(Gpu(match[1] if match else "unknown", _driver_version(), "unknown", "unknown"))
    return tuple(gpus)


def _driver_version() -> str:
    try:
        match = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "unknown"
    return match[1] if match else "unknown"


def _check_native() -> Check:
    spec = importlib.util.find_spec("ddtree_trt._native")
    detail = str(spec.origin) if spec else "not built; run: pip install . (needs a C++17 compiler)"
    return Check("native module", spec is not None, detail, "running any engine: trees and cache compaction in C++")


def _check_onnxruntime() -> Check:
    versions = installed_versions("onnxruntime", "onnxruntime-gpu")
    detail = _listing(versions) or "not installed; run: pip install onnxruntime"
    return Check("onnxruntime", bool(versions), detail, "the onnxruntime backend: engines on the CPU")


def _check_gpu(gpus: tuple[Gpu, ...]) -> Check:
    detail = ", ".join(f"{g.name} ({g.memory}, sm {g.compute_capability}, driver {g.driver})" for g in gpus)
    return Check("NVIDIA GPU", bool(gpus), detail or "none found", "the torch and tensorrt backends")


def _check_gpu_software() -> tuple[Check, ...]:
    torch, full, lean = (installed_versions(*names) for names in (("torch",), _TENSORRT, _LEAN))
    nvcc = shutil.which("nvcc")
    hint = "not installed; run: pip install 'ddtree-trt[{}]'".format
    return (
        Check("torch", bool(torch), _listing(torch) or hint("torch"), "the torch backend"),
        Check("TensorRT", bool(full), _listing(full) or hint("tensorrt"), "building and running tensorrt engines"),
        Check("TensorRT lean", bool(lean), _listing(lean) or "not installed", "running tensorrt engines, not building"),
        Check("nvcc", nvcc is not None, nvcc or "not on PATH", "compiling the CUDA kernels and the plugin library"),
    )


def _check_plugins() -> Check:
    spec = importlib.util.find_spec("ddtree_trt.plugins")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(str(path) for folder in folders for path in Path(folder).glob("*.so"))
    detail = ", ".join(found) or "not built"
    return Check("plugin library", bool(found), detail, "tree attention and cache compaction in tensorrt engines")


def _listing(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
