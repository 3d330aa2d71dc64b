"""The processor this process runs on."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# Below this many bytes of weights a pass is too short for threads to help: waking them costs more than they save.
SINGLE_THREAD_BYTES = 64 << 20

# Feature → the flags in /proc/cpuinfo of which any states it. x86 names first, then Arm's.
_FEATURES = {
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


@dataclass(frozen=True)
class Cpu:
    model: str
    cores: int  # usable by this process
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model}, {self.cores} cores"


def usable_cores() -> int:
    """Cores that this process may run on; all of the machine's where the system does not say, as on macOS."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def busy_warning(load_1min: float, cores: int) -> str | None:
    """What belongs beside times that were taken while more processes wanted to run than there are cores, else None."""
    if load_1min <= cores:
        return None
    return f"The machine was busy: load {load_1min:.2f} on {cores} cores. Do not trust times."


def read_cpu(cpuinfo: Path = CPUINFO) -> Cpu:
    """Model and features from a /proc/cpuinfo; no features where there is none."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([^\t:\n]+?)\s*: (.*)$", text, re.MULTILINE))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Cpu(
        model=fields.get("model name", platform.processor() or platform.machine()),
        cores=usable_cores(),
        features=tuple(name for name, any_of in _FEATURES.items() if flags.intersection(any_of)),
    )
