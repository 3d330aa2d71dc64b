"""What an engine needs of the Python and of the machine that serve it, in words for an exported model."""

from __future__ import annotations

from ddtree_trt import __version__
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.device.survey import DRIVER
from ddtree_trt.plugins import library


def extra(manifest: Manifest) -> str:
    """The brackets that pip wants behind the package's name."""
    found = BACKENDS[manifest.backend].extra
    return f"[{found}]" if found else ""


def package(manifest: Manifest) -> str:
    """What must be installed where the engine is opened, as pip writes it."""
    return f"ddtree-trt{extra(manifest)}=={__version__}"


def machine(manifest: Manifest) -> str:
    """Sentences on the rest: processor or GPU, driver, release of TensorRT, native libraries."""
    backend = BACKENDS[manifest.backend]
    if backend.on_cpu:
        return "It runs on CPUs."
    words = [
        f"It runs on an NVIDIA GPU{_kinds(manifest)} with driver {DRIVER} or newer; `ddtree-trt doctor` says what is "
        "missing."
    ]
    if backend.plans and (release := manifest.toolchain.get(manifest.backend)):
        words.append(f"It was built with {backend.title} {release} and is for that release.")
    if libraries := _libraries(manifest):
        words.append(
            f"It needs {' and '.join(libraries)}, which `make plugins` makes in `ddtree_trt/plugins/` of that "
            "checkout: copy them into the same folder of the installed package."
        )
    return " ".join(words)


def _kinds(manifest: Manifest) -> str:
    """The GPUs that the engine's plans are for."""
    kinds = manifest.toolchain.get("gpus") or f"sm{manifest.toolchain.get('sm', '')}"
    return f" ({kinds.replace(' ', ', ')})" if BACKENDS[manifest.backend].plans and kinds != "sm" else ""


def _libraries(manifest: Manifest) -> tuple[str, ...]:
    """The native libraries that are looked for when the engine is opened."""
    if BACKENDS[manifest.backend].kernels:
        return (library.TORCH,) if PRECISIONS[manifest.precision].half else ()
    return (library.PLUGINS,) if manifest.attention == "plugin" else ()
