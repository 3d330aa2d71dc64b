"""The autoregressive drafter of the ONNX Runtime engine."""

from pathlib import Path

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtLanguageModel


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    model = OrtLanguageModel(graph, manifest.drafter_dims, manifest, threads)
    return AutoregressiveDrafter(model, manifest.limits.prefill_chunk)
