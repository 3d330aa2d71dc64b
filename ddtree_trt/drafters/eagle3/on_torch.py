"""The passes of an EAGLE-3 drafter in PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, NewRows
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.torch.model import Decoder, DrafterParts, target_ids
from ddtree_trt.runtime.engines.torch.parallel.split import Vocabulary
from ddtree_trt.runtime.engines.torch.products import PYTORCH, ready_head


class TorchEagle:
    """The network and its cache. A pass of a draft computes all of its nodes anew: attention masks rows of the same
    pass only, and on a GPU the rows of one layer cost hardly more than its weights."""

    def __init__(self, dims: Eagle3Dims, parts: DrafterParts) -> None:
        self.dims = dims
        self.cache = parts.cache
        weights, target = parts.weights, parts.target
        self._decoder = Decoder(dims, weights, DRAFTER, parts.cache, parts.attention)
        self._fc = weights[f"{DRAFTER}fc"]
        self._state_norm = weights[f"{DRAFTER}state_norm"]
        self._embedding = weights[f"{DRAFTER}embedding"] if dims.own_embedding else target.embedding
        self._head = ready_head(weights[f"{DRAFTER}head"]) if dims.own_head else target.head
        self._product = PYTORCH if dims.own_head else target.product
        self._vocabulary = Vocabulary(dims.head_size)
        self._kernels = parts.attention.kernels
        self._target_ids = target_ids(weights)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces))

    def absorb(self, rows: Sequence[NewRows], top_k: int) -> Level:
        x = F.linear(pad_sequence([each.states for each in rows], batch_first=True), self._fc)
        return self._pass(rows, x, MaskMode.CAUSAL, top_k)

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        x = pad_sequence([torch.stack(each.states) for each in rows], batch_first=True)
        return self._pass(rows, x, MaskMode.TREE, top_k)

    def _pass(self, rows: Sequence[NewRows], states: Tensor, mode: MaskMode, top_k: int) -> Level:
        """A pass with the fused states [N, T, H], padded to the most rows."""
        place, token_ids, positions = self.cache.place(rows)
        dims, decoder = self.dims, self._decoder
        eps, (layer,) = dims.rms_norm_eps, decoder.layers
        x, state = decoder.math.add_norm(states, None, self._state_norm, eps)
        embedded = F.embedding(token_ids, self._embedding)
        _, token = decoder.math.add_norm(embedded, None, layer.input_norm, eps)
        attended = decoder.attend(0, torch.cat((token, state), -1), positions, place, mode)
        x, h = decoder.math.add_norm(state if dims.norm_before_residual else x, attended, layer.post_norm, eps)
        x, h = decoder.math.add_norm(x, decoder.mlp(layer, h), decoder.norm, eps)
        wanted = [(n, slice(each.first, len(each.tree))) for n, each in enumerate(rows)]
        normed, outputs = (torch.cat([values[at] for at in wanted]) for values in (h, x))
        logits = self._product.logits(normed, self._head)
        log_probs, ids = self._vocabulary.most_probable(logits, min(top_k, dims.head_size), kernels=self._kernels)
        if self._target_ids is not None:
            ids = self._target_ids[ids]
        kept = normed if dims.norm_output else outputs
        return Level(list(kept), log_probs.cpu().numpy(), ids.to(torch.int32).cpu().numpy())


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    limits = manifest.limits
    return EagleDrafter(TorchEagle(manifest.drafting.dims, parts), limits.prefill_chunk, limits.max_tokens_per_pass)
