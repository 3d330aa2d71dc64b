"""The autoregressive drafter of the PyTorch engine."""

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.torch.model import DrafterParts, LanguageModel


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    model = LanguageModel(manifest.drafter_dims, parts.weights, DRAFTER, parts.cache, parts.attention)
    return AutoregressiveDrafter(model, manifest.limits.prefill_chunk)
