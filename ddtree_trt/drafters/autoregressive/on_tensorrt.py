"""The autoregressive drafter of the TensorRT engine."""

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.device import buffers
from ddtree_trt.device.cuda_device import Upload
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.tensorrt.model import TrtLanguageModel
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork
from ddtree_trt.runtime.engines.tensorrt.opening import Loaded


def make(
    manifest: Manifest, loaded: Loaded, network: TrtNetwork, upload: Upload, host_results: NDArray[np.uint8]
) -> Drafter:
    """The drafter that runs `network`, with control data in `upload` and drafts in `host_results`."""
    at, vocab = loaded.addresses, manifest.drafter_dims.vocab_size
    outputs = {names.CHOICES: at[buffers.RESULTS], names.LOGITS: at[buffers.DRAFT_LOGITS]}
    model = TrtLanguageModel(network, manifest.limits, vocab, upload, outputs, host_results)
    return AutoregressiveDrafter(model, manifest.limits.prefill_chunk)
