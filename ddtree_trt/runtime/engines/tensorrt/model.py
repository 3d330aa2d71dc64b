"""A language model in TensorRT, the target or an autoregressive drafter: passes over trees of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.device.buffers import FLOAT_BYTES, INT_BYTES
from ddtree_trt.device.cuda_device import Upload
from ddtree_trt.device.libraries import io_tensors
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.passes import LazyRows, SlotLengths, mask_words, pad_trees
from ddtree_trt.runtime.engines.tensorrt.compaction import DeltaStates
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork
from ddtree_trt.runtime.tree import token_chain

_IDLE = token_chain(np.zeros(1, np.int64))


class TrtLanguageModel:
    """Passes over the trees of several slots, with the lengths of their caches."""

    def __init__(
        self, network: TrtNetwork, limits: Limits, vocab: int, upload: Upload, outputs: Mapping[str, int],
        host_results: NDArray[np.uint8], states: DeltaStates | None = None,
    ) -> None:  # fmt: skip
        """`outputs`: addresses on the device, by name. `host_results`: the host's memory for choices."""
        self.network = network
        self.cache = SlotLengths(limits.max_batch, limits.cache_rows, states)
        self.generation = 0  # number of the pass whose outputs are in memory: the next one overwrites them
        self._device = network.shared.device
        self._vocab = vocab
        self._upload = upload
        self._outputs, self._host_results = outputs, host_results
        self._hybrid = names.PARENTS in io_tensors(network.engine)
        self._mask_words = mask_words(limits.max_tokens_per_pass)

    def pass_requests(self, requests: Sequence[VerifyRequest]) -> Sequence[VerifyRequest]:
        """The requests of their pass: with native attention by slot, with a tree for every idle one between them."""
        if not self.network.neighbours:
            return requests
        wanted = {r.slot: r for r in requests}
        return [wanted.get(slot) or VerifyRequest(slot, _IDLE) for slot in range(min(wanted), max(wanted) + 1)]

    def run(
        self, requests: Sequence[VerifyRequest], tokens: int, rows: NDArray[np.int64], *, captured: bool
    ) -> NDArray[np.int64]:
        """A pass over all trees of `pass_requests`, T padded to `tokens`: the choices [R] at these flat rows."""
        for request in requests:
            self.cache.check_room(request.slot, tokens)
        trees = pad_trees(requests, self.cache.lengths, tokens, self._mask_words)
        control = {
            names.TOKEN_IDS: trees.token_ids,
            names.POSITIONS: trees.positions,
            names.PAST_LEN: trees.past_len,
            names.TREE_MASK: trees.tree_mask,
            names.ROWS: rows.astype(np.int32),
        }
        if self._hybrid:
            control[names.PARENTS] = trees.parents
        self.generation += 1
        key = (len(requests), tokens) if captured else None
        self.network.run([r.slot for r in requests], self._upload, control, self._outputs, key=key)
        found = self._host_results[: len(rows) * INT_BYTES]
        self._device.download(found, self._outputs[names.CHOICES])
        self._device.synchronize()
        return found.view(np.int32).astype(np.int64)

    def logits(self, first: int, rows: int) -> LazyRows:
        """The last pass's logits [rows, V] from row `first` on, copied to the host when they are read."""
        generation, base = self.generation, self._outputs[names.LOGITS] + first * self._vocab * FLOAT_BYTES

        def fetch(start: int, stop: int, columns: slice) -> NDArray[np.float32]:
            if generation != self.generation:
                raise EngineError("these logits are gone: the engine has made another pass since")
            column, end, _ = columns.indices(self._vocab)
            found = np.empty((stop - start, end - column), np.float32)
            self._device.download(found, base + (start * self._vocab + column) * FLOAT_BYTES)
            self._device.synchronize()
            return found

        return LazyRows(rows, self._vocab, fetch)

    def extend(self, chains: Sequence[VerifyRequest]) -> list[NDArray[np.float32]]:
        """See `drafters.LanguageModel`. Passes of single tokens are captured; longer ones are padded."""
        passed, tokens = self.pass_requests(chains), max(len(chain.tree) for chain in chains)
        last = [n * tokens + len(request.tree) - 1 for n, request in enumerate(passed)]
        self.run(passed, tokens, np.array(last), captured=tokens == 1)
        logits = {request.slot: row for request, row in zip(passed, np.asarray(self.logits(0, len(last))), strict=True)}
        for chain in chains:
            self.cache.append(chain.slot, len(chain.tree))
        return [logits[chain.slot] for chain in chains]
