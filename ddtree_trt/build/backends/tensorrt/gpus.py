"""Which kinds of GPU an engine of TensorRT for RTX is for."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.device.gpus import Gpu, find_gpus
from ddtree_trt.device.rtx_kinds import KINDS, UNSERVED
from ddtree_trt.errors import BuildError, UsageError, shown


def named_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """The kinds the user named, each once. Raises UsageError for one that an engine cannot be for."""
    for name in names:
        if name in UNSERVED:
            raise UsageError(f"--gpu {name} {UNSERVED[name]}")
        if name not in KINDS:
            raise UsageError(f"--gpu must be one of {', '.join(KINDS)}, not {shown(name)}")
    return tuple(dict.fromkeys(names))


def kinds_here(found: Iterable[Gpu]) -> tuple[str, ...]:
    """The kinds of this machine's GPUs that an engine can be for; none where it has no GPU whose kind is known. Raises
    BuildError where it has others only."""
    names = _names(found)
    served = tuple(name for name in names if name in KINDS)
    if names and not served:
        name, title = next(iter(names.items()))
        raise BuildError(
            f"this machine's {title} ({name}) {UNSERVED.get(name, 'is not served by TensorRT for RTX')}, or name the "
            f"GPUs that the engine is for: --gpu {', --gpu '.join(KINDS)}"
        )
    return served


def runs_here(manifest: Manifest) -> bool:
    """Whether an engine is for a GPU of this machine, as every engine is that is compiled on the machine it is for."""
    if not BACKENDS[manifest.backend].portable:
        return True
    return any(kind in _names(find_gpus()) for kind in manifest.toolchain["gpus"].split())


def _names(found: Iterable[Gpu]) -> dict[str, str]:
    """Kind → title of those GPUs whose kind is known."""
    known = (gpu for gpu in found if gpu.compute_capability != "unknown")
    return {f"sm{gpu.compute_capability.replace('.', '')}": gpu.name for gpu in known}
