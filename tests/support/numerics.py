"""Numerics against PyTorch: the target as transformers computes it, and an engine's slot followed token by token.

The truth is kept plain: every sequence of tokens goes through the network whole, causally, without a cache or a mask.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.base import Verdict, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.tree import TokenTree, token_chain

Array = NDArray[np.float32]
TOLERANCE = 1e-4  # largest error, in units of the expected values' root mean square

torch.set_num_threads(1)  # two would wait for each other on networks this small
transformers.utils.logging.disable_progress_bar()


def assert_close(found: Array, expected: Array, what: str, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape} for {expected.shape}"
    error = np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected)))
    assert error <= tolerance, f"{what}: off by {error:.1e} of the scale"


class Truth:
    """A target in transformers, float32, which remembers what it said."""

    def __init__(self, directory: Path, tap_layers: Sequence[int]) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._taps: dict[int, torch.Tensor] = {}
        self._known: dict[tuple[int, ...], tuple[Array, Array]] = {}
        for index in tap_layers:
            self.model.model.layers[index].register_forward_hook(self._keeper(index))

    def _keeper(self, index: int) -> Any:
        def keep(module: object, inputs: object, output: Any) -> None:
            self._taps[index] = output if isinstance(output, torch.Tensor) else output[0]

        return keep

    def __call__(self, tokens: Sequence[int] | NDArray[np.int64]) -> tuple[Array, Array]:
        """Logits [T, V] and tapped layers' outputs side by side [T, M·H] of a sequence."""
        if (asked := tuple(map(int, tokens))) not in self._known:
            with torch.inference_mode():
                logits = self.model(torch.tensor([asked]), use_cache=False).logits[0].numpy()
                taps = torch.cat([self._taps[i][0] for i in sorted(self._taps)], dim=-1).numpy()
            self._known[asked] = logits, taps
        return self._known[asked]


truths = lru_cache(4)(Truth)  # where several engines in a row are asked the same


def random_tree(rng: np.random.Generator, nodes: int, vocab_size: int) -> TokenTree:
    """A tree of `nodes` tokens, root included, each below any earlier one: siblings and cousins lie between a node and
    its parent."""
    parents = [-1, *(int(rng.integers(i)) for i in range(1, nodes))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = rng.integers(0, vocab_size, nodes)
    return TokenTree(tokens, np.array(parents, np.int32), np.array(depths, np.int32))


def path_to(tree: TokenTree, node: int) -> NDArray[np.int32]:
    """The nodes from the root to `node`."""
    path = [node]
    while (parent := int(tree.parents[path[-1]])) >= 0:
        path.append(parent)
    return np.array(path[::-1], np.int32)


Measured = OrtEngine | TorchEngine | ParallelEngine | TrtEngine  # engines whose numbers are compared


def follow_paths(engine: Any, alone: Any, trees: Mapping[int, TokenTree], same: Callable[[Any, Any], None]) -> None:
    """Verify trees by slot in one pass and commit the deepest path of each, of which `same` compares the logits of
    every node with those of its token alone, in passes of the other engine."""
    verdicts = engine.verify([VerifyRequest(slot, tree) for slot, tree in trees.items()])
    for (slot, tree), verdict in zip(trees.items(), verdicts, strict=True):
        path = path_to(tree, int(tree.depths.argmax()))
        for node in path:
            (single,) = alone.verify([VerifyRequest(slot, token_chain(tree.token_ids[[node]]))])
            same(verdict.logits[node], single.logits[0])
            alone.commit(slot, np.zeros(1, np.int32), taps=False)
        engine.commit(slot, path, taps=False)


def drafter_of(engine: Measured) -> Any:
    """What the engine tells of committed tokens."""
    return engine._engine.drafter if isinstance(engine, ParallelEngine) else engine.drafter  # rank 0's


def states_of(engine: Measured, states: Any, rows: int) -> Array:
    """The states [rows, M·H] that a drafter is told; those of a TensorRT engine are an address on its fake device."""
    if not isinstance(engine, TrtEngine):
        return np.asarray(states).astype(np.float32)
    engine.synchronize()
    memory: Array = engine.device.api.device.view(states, rows * engine._state_bytes).view(np.float32)
    return memory.reshape(rows, -1).copy()


class Follower:
    """One slot of an engine beside the truth: whatever the engine says of its tokens is compared, row by row."""

    def __init__(self, engine: Measured, slot: int, truth: Truth) -> None:
        self.engine, self.slot, self.truth = engine, slot, truth
        self.tokens: list[int] = []  # committed
        self._tree: TokenTree | None = None
        self._told: list[Array] = []  # states [m, M·H] of the last commit
        drafter = drafter_of(engine)
        append = drafter.append_context

        def spy(slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
            assert states is not None
            if slot == self.slot:
                assert token_ids.tolist() == self.tokens[-len(token_ids) :]
                self._told.append(states_of(engine, states, len(token_ids)))
            append(slot, token_ids, states)

        drafter.append_context = spy

    def prefill(self, token_ids: Sequence[int] | NDArray[np.int64], *, taps: bool = True) -> None:
        self.tokens += [int(t) for t in token_ids]
        verdict = self.engine.prefill(self.slot, np.array(token_ids, np.int64), rows="all", taps=taps)
        logits, states = self.truth(self.tokens)
        self._compare(verdict, logits[-len(token_ids) :], f"prefill to {len(self.tokens)}")
        if taps:
            self._compare_states(states[-len(token_ids) :])

    def request(self, tree: TokenTree) -> VerifyRequest:
        self._tree = tree
        return VerifyRequest(self.slot, tree)

    def check(self, verdict: Verdict) -> None:
        """Compare what the engine said of the last requested tree, one root-to-leaf path after the other."""
        tree = self._tree
        assert tree is not None
        seen = set()
        for leaf in sorted(set(range(len(tree))) - set(tree.parents.tolist())):
            path = path_to(tree, leaf)
            logits, _ = self.truth([*self.tokens, *tree.token_ids[path].tolist()])
            said = Verdict(verdict.choices[path], np.asarray(verdict.logits)[path])
            self._compare(said, logits[-len(path) :], f"path {path.tolist()} behind {len(self.tokens)}")
            seen |= set(path.tolist())
        assert seen == set(range(len(tree)))

    def verify(self, tree: TokenTree) -> None:
        self.check(self.engine.verify([self.request(tree)])[0])

    def commit(self, path: NDArray[np.int32]) -> None:
        assert self._tree is not None
        self.tokens += self._tree.token_ids[path].tolist()
        self.engine.commit(self.slot, path, taps=True)
        self._compare_states(self.truth(self.tokens)[1][-len(path) :])
        assert self.engine.length(self.slot) == len(self.tokens)

    def truncate(self, length: int) -> None:
        kept = self.engine.restorable(self.slot, length)
        assert kept == length or self.engine.manifest.target_dims.delta
        self.engine.truncate(self.slot, length)
        assert self.engine.length(self.slot) == kept
        del self.tokens[kept:]

    def _compare(self, verdict: Verdict, logits: Array, what: str) -> None:
        found = np.asarray(verdict.logits)
        assert_close(found, logits, what)
        np.testing.assert_array_equal(verdict.choices, found.argmax(-1))

    def _compare_states(self, states: Array) -> None:
        (told,) = self._told
        self._told.clear()
        assert_close(told, states, f"states of {len(states)} tokens to {len(self.tokens)}")
