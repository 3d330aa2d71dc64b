"""What a machine has of what engines for GPUs need, as `build --backend auto` and `doctor` look at it."""

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_trt.artifact import backends
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.device.gpus import Gpu, available_bytes, find_gpus, visible_gpus
from ddtree_trt.device.libraries import cuda_bindings, cuda_of_driver, import_tensorrt
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.plugins import ABI, library

# Our kernels, and NVIDIA's packages of the extras, are for CUDA 13, which asks for this driver.
CUDA, DRIVER = 13, 580

# Names under which a module's package may be installed: for TensorRT they depend on the release of CUDA.
TORCH = backends.TORCH.modules[0]
TENSORRT, CUDA_PYTHON = backends.TENSORRT.modules
TENSORRT_RTX = backends.TENSORRT_RTX.modules[0]
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    TENSORRT: (TENSORRT, "tensorrt_cu13", "tensorrt_cu13_bindings", "tensorrt_cu12", "tensorrt_cu12_bindings"),
    TENSORRT_RTX: (backends.TENSORRT_RTX.name, "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings"),
    CUDA_PYTHON: ("cuda-python", "cuda-bindings"),
    TORCH: (TORCH,),
}


@dataclass(frozen=True)
class Survey:
    """A machine's findings. The defaults are a machine that has nothing."""

    gpus: tuple[Gpu, ...] = ()  # those that CUDA shows to this process
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES; None where it is not set
    driver_cuda: str | None = None  # the newest CUDA that the driver supports, 13.0; None without libcuda.so.1
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # module → installed packages → version
    faults: Mapping[str, str] = field(default_factory=dict)  # installed module → why it cannot be imported
    torch_cuda: str | None = None  # the CUDA that the installed torch is built for; None for a CPU's
    libraries: frozenset[str] = frozenset()  # native libraries that are built, with this version's ABI
    nvcc: str | None = None  # its path
    host_bytes: int | None = None  # of the machine's memory

    @property
    def gpu(self) -> Gpu | None:
        return self.gpus[0] if self.gpus else None

    @property
    def no_gpu(self) -> str:
        """What to say where there is none."""
        chosen = f" (CUDA_VISIBLE_DEVICES is {self.visible_devices!r})" if self.visible_devices is not None else ""
        return f"no NVIDIA GPU is visible{chosen}"

    def driver_runs(self, cuda: str = f"{CUDA}.0") -> bool:
        """Whether the driver runs what is made for a release of CUDA, of which the major number counts."""
        return self.driver_cuda is not None and _major(self.driver_cuda) >= _major(cuda)

    def fault(self, module: str) -> str | None:
        """Why an installed module cannot be used; None where it can, as far as is known."""
        if module == TORCH and not self.torch_cuda:
            return f"{module} is a build for CPUs; {install_with(backends.TORCH.extra)}"
        return self.faults.get(module)

    def version(self, module: str) -> str | None:
        return next(iter(self.versions.get(module, {}).values()), None)


def survey_machine(*, import_modules: bool) -> Survey:
    """This machine's findings. With `import_modules`, and where there is a GPU, NVIDIA's packages are imported to see
    whether they can be; torch never is, because that takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus(find_gpus(), visible)
    versions = {module: installed_versions(*names) for module, names in DISTRIBUTIONS.items()}
    faults = {}
    for module in (TENSORRT, TENSORRT_RTX, CUDA_PYTHON) if import_modules and gpus else ():
        try:
            if versions[module] and module == CUDA_PYTHON:
                cuda_bindings()
            elif versions[module]:
                import_tensorrt(f"{module} cannot be imported", rtx=module == TENSORRT_RTX)
        except MissingDependency as error:
            faults[module] = str(error)
    return Survey(
        gpus=gpus,
        visible_devices=visible,
        driver_cuda=cuda_of_driver(),
        versions=versions,
        faults=faults,
        torch_cuda=torch_cuda(),
        libraries=frozenset(name for name in library.NAMES if library.abi_of(library.library_path(name)) == ABI),
        nvcc=shutil.which("nvcc"),
        host_bytes=available_bytes("host", ()),
    )


def _major(version: str) -> int:
    return int(version.split(".")[0])


def torch_cuda() -> str | None:
    """The CUDA that the installed torch is built for, read from its files; None for a CPU's, or without torch."""
    spec = importlib.util.find_spec(TORCH)
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
