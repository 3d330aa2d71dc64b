"""The kinds of GPU that TensorRT for RTX compiles for, and which of them an engine is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.build.backends.tensorrt.machine import LOWEST_FP8_SM
from ddtree_trt.device.gpus import Gpu, find_gpus
from ddtree_trt.errors import BuildError, UsageError, shown

KINDS: Mapping[str, int] = {f"sm{sm}": sm for sm in (75, 80, 86, 89, 120, 121)}  # name → compute capability, times 10
DATA_CENTRE = ("sm90", "sm100", "sm103")  # TensorRT's own
_LOWEST_SM: Mapping[str, int] = {"bf16": 80, "fp16": 75}  # the first GPUs that multiply values of a precision


def named_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """The kinds the user named, each once. Raises UsageError for one that TensorRT for RTX does not compile for."""
    for name in names:
        if name in DATA_CENTRE:
            raise UsageError(f"--gpu {name} is a GPU that TensorRT for RTX does not serve; use --backend tensorrt")
        if name not in KINDS:
            raise UsageError(f"--gpu must be one of {', '.join(KINDS)}, not {shown(name)}")
    return tuple(dict.fromkeys(names))


def kinds_here(found: Iterable[Gpu]) -> tuple[str, ...]:
    """The kinds of this machine's GPUs; none where it has none, or none whose kind is known. Raises BuildError where
    TensorRT for RTX serves none of them."""
    names = _names(found)
    served = tuple(name for name in names if name in KINDS)
    if names and not served:
        name, title = next(iter(names.items()))
        raise BuildError(
            f"TensorRT for RTX does not serve this machine's {title} ({name}); use --backend tensorrt, or name the "
            f"GPUs that the engine is for: --gpu {', --gpu '.join(KINDS)}"
        )
    return served


def runs_here(manifest: Manifest) -> bool:
    """Whether an engine is for a GPU of this machine, as every engine is that is compiled on the machine it is for."""
    if manifest.backend != "tensorrt-rtx":
        return True
    return any(kind in _names(find_gpus()) for kind in manifest.toolchain["gpus"].split())


def _names(found: Iterable[Gpu]) -> dict[str, str]:
    """Kind → title of those GPUs whose kind is known."""
    known = (gpu for gpu in found if gpu.compute_capability != "unknown")
    return {f"sm{gpu.compute_capability.replace('.', '')}": gpu.name for gpu in known}


def able(kinds: Iterable[str], precision: PrecisionName, *, fp8: bool = False) -> tuple[str, ...]:
    """Those of the kinds that compute in a precision, and with `fp8` in FP8 too."""
    lowest = max(_LOWEST_SM[precision], LOWEST_FP8_SM if fp8 else 0)
    return tuple(kind for kind in kinds if KINDS[kind] >= lowest)
