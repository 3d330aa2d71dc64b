"""The NVIDIA GPUs of this machine, found without the libraries of CUDA."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ddtree_trt.artifact.backends import TENSORRT, TENSORRT_RTX, TORCH, Place

_GPU_QUERY = "name,driver_version,memory.total,compute_cap"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    memory: str  # e.g. "143771 MiB"
    compute_capability: str  # e.g. "9.0"

    @property
    def memory_bytes(self) -> int | None:
        match = re.fullmatch(r"(\d+) MiB", self.memory)
        return int(match[1]) << 20 if match else None

    @property
    def sm(self) -> int | None:
        """Its compute capability as compilers write it: 90 for 9.0; None where it is not known."""
        match = re.fullmatch(r"(\d+)\.(\d)", self.compute_capability)
        return 10 * int(match[1]) + int(match[2]) if match else None

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability})"


def find_gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs by nvidia-smi; empty without it, or without a driver behind it."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in run.stdout.splitlines()]
    return tuple(Gpu(*row) for row in rows if len(row) == len(_GPU_QUERY.split(",")))


def visible_gpus(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """Those of a machine's GPUs that CUDA shows to a process whose CUDA_VISIBLE_DEVICES is `chosen`; None where it is
    not set. As CUDA does, the first number without a GPU ends the list. GPUs named in another way are all kept."""
    if chosen is None:
        return gpus
    found = []
    for word in chosen.split(",") if chosen.strip() else ():
        if not re.fullmatch(r"-?\d+", word.strip()):
            return gpus
        if not 0 <= int(word) < len(gpus):
            break
        found.append(gpus[int(word)])
    return tuple(found)


def available_bytes(place: Place, gpus: tuple[Gpu, ...]) -> int | None:
    """Bytes of the memory an engine runs in, the first GPU's or the host's; None where there is none or unknown."""
    if gpus and place != "host":
        return gpus[0].memory_bytes
    return None if place == "GPU" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


KINDS: Mapping[str, int] = {f"sm{sm}": sm for sm in TENSORRT_RTX.sms}  # name → compute capability, times 10
# Kinds that exist and are not served: what they lack, and what serves them. Data-centre GPUs are TensorRT's own;
# Turing's kernels have neither bf16 nor the float32 product of a head, though TensorRT for RTX knows it.
_TENSORRT = f"is a data-centre GPU, which {TENSORRT_RTX.title} does not serve; use --backend {TENSORRT.name}"
_TORCH = f"is too old for the engine's products in bf16 and float32; use --backend {TORCH.name}"
UNSERVED: Mapping[str, str] = {"sm75": _TORCH, **dict.fromkeys(("sm90", "sm100", "sm103"), _TENSORRT)}
