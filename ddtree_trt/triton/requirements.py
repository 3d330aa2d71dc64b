"""What an engine needs of the Python and of the machine that serve it, in words for an exported model."""

from __future__ import annotations

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PLAN_BACKENDS, PRECISIONS
from ddtree_trt.device.survey import DRIVER
from ddtree_trt.plugins import library

_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}


def extra(manifest: Manifest) -> str:
    """The brackets that pip wants behind the package's name: a backend for GPUs has an extra of its name."""
    return "" if manifest.backend == "onnxruntime" else f"[{manifest.backend}]"


def package(manifest: Manifest) -> str:
    """What must be installed where the engine is opened, as pip writes it."""
    return f"ddtree-trt{extra(manifest)}=={__version__}"


def machine(manifest: Manifest) -> str:
    """Sentences on the rest: processor or GPU, driver, release of TensorRT, native libraries."""
    if manifest.backend == "onnxruntime":
        return "It runs on CPUs."
    words = [
        f"It runs on an NVIDIA GPU{_kinds(manifest)} with driver {DRIVER} or newer; `ddtree-trt doctor` says what is "
        "missing."
    ]
    if manifest.backend in PLAN_BACKENDS and (release := manifest.toolchain.get(manifest.backend)):
        words.append(f"It was built with {_TITLES[manifest.backend]} {release} and is for that release.")
    if libraries := _libraries(manifest):
        words.append(
            f"It needs {' and '.join(libraries)}, which `make plugins` makes in `ddtree_trt/plugins/` of that "
            "checkout: copy them into the same folder of the installed package."
        )
    return " ".join(words)


def _kinds(manifest: Manifest) -> str:
    """The GPUs that the engine's plans are for."""
    kinds = manifest.toolchain.get("gpus") or f"sm{manifest.toolchain.get('sm', '')}"
    return f" ({kinds.replace(' ', ', ')})" if manifest.backend in PLAN_BACKENDS and kinds != "sm" else ""


def _libraries(manifest: Manifest) -> tuple[str, ...]:
    """The native libraries that are looked for when the engine is opened."""
    if manifest.backend == "torch":
        return (library.TORCH,) if PRECISIONS[manifest.precision].half else ()
    return (library.PLUGINS,) if manifest.attention == "plugin" else ()
