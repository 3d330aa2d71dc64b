"""The backends, each stated once: who reads a backend's name asks this record for what it means."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from ddtree_trt.artifact import files
from ddtree_trt.artifact.precisions import PrecisionName

BackendName = Literal["onnxruntime", "torch", "tensorrt", "tensorrt-rtx"]
Place = Literal["host", "GPU", "device"]  # the last is a GPU where there is one, else the host


@dataclass(frozen=True)
class Backend:
    """What a backend is made of, and what it can do."""

    name: BackendName
    title: str  # of the library that computes
    place: Place  # whose memory its engines take
    precisions: tuple[PrecisionName, ...]  # that its engines compute in, the default first; a build may offer fewer
    builds: tuple[PrecisionName, ...]  # that new engines may have, the default first
    files: tuple[str, ...]  # of every engine directory, besides manifest and tokenizer
    builder: str  # what makes its `BackendBuild` of `BuilderOptions`, as module:name
    engine: str  # what opens an engine directory, likewise: (directory, manifest, options) → an `Engine`
    half: str  # of drafter kinds, for its engines: `drafters/KIND/HALF.py`
    extra: str = ""  # of our package, with what it needs; "" where every installation has that
    modules: tuple[str, ...] = ()  # of NVIDIA's packages, by the names of `device/survey.py`
    # Of the library, as in pyproject.toml: the lowest whose API is the one used here, and the first too new.
    releases: tuple[tuple[int, int], tuple[int, int]] | None = None
    plans: bool = False  # whether its engines are plans of a TensorRT
    portable: bool = False  # whether plans are compiled on any machine, for the kinds of GPU they name
    attentions: tuple[str, ...] = ()  # what may compute attention in its plans
    device_rounds: bool = False  # whether its rounds can stay on the device
    sms: tuple[int, ...] = ()  # compute capabilities, times 10, of the GPUs it serves; none: our kernels' own
    kernels: bool = False  # whether its engines in half precision need the library of our kernels
    experts: bool = True  # whether it computes mixtures of experts

    @property
    def on_cpu(self) -> bool:
        """Whether its engines never use a GPU."""
        return self.place == "host"

    @property
    def releases_text(self) -> str:
        lowest, below = self.releases or ((0, 0), (0, 0))
        return f"{'.'.join(map(str, lowest))} or newer below {below[0]}"

    def serves_release(self, version: str) -> bool:
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        return self.releases is None or self.releases[0] <= numbers < self.releases[1]


ONNXRUNTIME = Backend(
    name="onnxruntime",
    title="ONNX Runtime",
    place="host",
    precisions=("fp32", "int8"),
    builds=("fp32", "int8"),
    files=(files.TARGET_GRAPH, files.DRAFTER_GRAPH, files.WEIGHTS),
    builder="ddtree_trt.build.backends.onnxruntime.backend:OnnxRuntimeBuild",
    engine="ddtree_trt.runtime.engines.onnxruntime.engine:OrtEngine",
    half="onnxruntime",
)
TORCH = Backend(
    name="torch",
    title="PyTorch",
    place="device",
    precisions=("fp32", "bf16", "fp16"),
    builds=("fp32", "bf16", "fp16"),
    files=(files.TORCH_WEIGHTS,),
    builder="ddtree_trt.build.backends.torch.backend:TorchBuild",
    engine="ddtree_trt.runtime.engines.torch.parallel.engine:open_torch",
    half="torch",
    extra="torch",
    modules=("torch",),
    device_rounds=True,
    kernels=True,
)
TENSORRT = Backend(
    name="tensorrt",
    title="TensorRT",
    place="GPU",
    precisions=("bf16", "fp16", "fp32"),
    builds=("bf16", "fp16"),
    files=(files.TARGET_PLAN, files.DRAFTER_PLAN, files.COMPACTION_PLAN, files.SHARED_WEIGHTS),
    builder="ddtree_trt.build.backends.tensorrt.backend:TensorRtBuild",
    engine="ddtree_trt.runtime.engines.tensorrt.engine:TrtEngine.open",
    half="tensorrt",
    extra="tensorrt",
    modules=("tensorrt", "cuda.bindings.runtime"),
    releases=((11, 1), (12, 0)),
    plans=True,
    attentions=("plugin", "native"),
    experts=False,
)
TENSORRT_RTX = replace(
    TENSORRT,
    name="tensorrt-rtx",
    title="TensorRT for RTX",
    precisions=("bf16", "fp16"),
    builder="ddtree_trt.build.backends.tensorrt.backend:RtxBuild",
    extra="tensorrt-rtx",
    modules=("tensorrt_rtx", "cuda.bindings.runtime"),
    releases=((1, 7), (2, 0)),
    portable=True,
    sms=(80, 86, 89, 120, 121),
    attentions=("native",),
)
BACKENDS: Mapping[str, Backend] = {b.name: b for b in (ONNXRUNTIME, TORCH, TENSORRT, TENSORRT_RTX)}
BEST_ON_GPUS = (TENSORRT, TENSORRT_RTX, TORCH)


def load(place: str) -> Any:
    """What a text as module:name names, imported."""
    module, name = place.split(":")
    return attrgetter(name)(importlib.import_module(module))
