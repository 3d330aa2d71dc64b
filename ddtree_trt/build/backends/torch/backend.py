"""The torch part of a build: both networks' weights in one safetensors file, in the engine's precision.

Nothing is compiled and PyTorch is not needed: the file is written tensor by tensor, straight from the checkpoints.
"""

import math
import platform
from pathlib import Path

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import TORCH
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName, block_drafter_precision
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.tensor_files import encode, safetensors_header
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.artifact.weight_layout import DRAFTER, TARGET, stored_weights
from ddtree_trt.build.backends.base import BackendBuild, Inputs, Written

_OWN = {"int32": "I32", "float32": "F32"}  # types that are not the precision's, in a safetensors header
_GPU_CONTROL = Path("/dev/nvidiactl")  # exists when an NVIDIA driver is loaded


class TorchBuild(BackendBuild):
    """The build for PyTorch. Precision `auto` is bf16 where there is an NVIDIA GPU, else fp32."""

    backend = TORCH

    @property
    def precisions(self) -> tuple[PrecisionName, ...]:
        on_gpu = _GPU_CONTROL.exists()
        return tuple(sorted(TORCH.builds, key=lambda p: on_gpu and not PRECISIONS[p].half))

    def write(self, directory: Path, inputs: Inputs, progress: Progress) -> Written:
        target, drafter, precision = inputs.target, inputs.drafter, inputs.precision
        tied = {"target_tied": target.tie_word_embeddings, "drafter_tied": drafter.tie_word_embeddings}
        weights = stored_weights(target.dims, drafter.dims, **tied)
        own = block_drafter_precision(precision) if drafter.kind.block_size else precision
        networks = {TARGET: (target, PRECISIONS[precision]), DRAFTER: (drafter, PRECISIONS[own])}
        of = {w.name: networks[TARGET if w.name.startswith(TARGET) else DRAFTER] for w in weights}
        types = {w.name: _OWN.get(w.dtype, of[w.name][1].safetensors) for w in weights}
        total, done = PRECISIONS[precision].value_bytes * sum(math.prod(w.shape) for w in weights), 0
        with (directory / artifact.TORCH_WEIGHTS).open("xb") as file:
            file.write(safetensors_header({w.name: (types[w.name], w.shape) for w in weights}))
            for weight, source in ((w, source) for w in weights for source in w.sources):
                checkpoint, stored = of[weight.name]
                values, dtype = checkpoint.tensor(source), weight.dtype or stored.dtype
                data = values.astype("<i4") if dtype == "int32" else encode(values, dtype, source)
                file.write(data.data)
                done += data.nbytes
                progress("write weights", done, total)
        return Written({}, {"python": platform.python_version(), **installed_versions("numpy", *TORCH.modules)})
