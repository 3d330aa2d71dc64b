"""The graph of heads whose children depend on their parent, and of convolutions.

`models.drafters.heads` has the formulas. Their weights are never rounded to
8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ddtree_trt.artifact import tensors as names
from ddtree_trt.build.graph.ops import Graph
from ddtree_trt.build.graph.rotation import Weights
from ddtree_trt.models.decoder import Part
from ddtree_trt.models.drafters.dflash import DrafterDims, layer_convolutions
from ddtree_trt.models.drafters.heads import Convolution, PairHead


class _Parts:
    """The parts of a checkpoint as weights of a graph."""

    def __init__(self, g: Graph, weights: Weights, prefix: str) -> None:
        """`prefix` keeps the weights apart in the graph."""
        self.g = g
        self._weights = weights
        self._prefix = prefix

    def weight(self, part: Part, key: str = "", change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> str:
        """The part as `change` returns it, under its checkpoint's name and `key`."""
        (source,) = part.sources

        def make() -> np.ndarray:
            return np.ascontiguousarray(change(self._weights(source)))

        return self.g.weight(f"{self._prefix}{source}{key}", make)

    def product(self, x: str, part: Part, out: str) -> str:
        """x [..., in] times the part [out, in]."""
        return self.g.product(x, self.weight(part, ".transposed", np.transpose), out)


class PairFactors:
    """The factors of the scores of pairs of candidates."""

    def __init__(self, g: Graph, head: PairHead, weights: Weights, prefix: str) -> None:
        self.candidates = head.candidates
        self._g = g
        self._head = head
        self._parts = _Parts(g, weights, prefix)

    def add(self, hidden: str, token_ids: str, candidates: str, draft_ids: str, length: int) -> None:
        """Add the outputs `left` and `right`, float32 [N, L, C, r].

        hidden [N, L, H] are the normed states of the rows that draft, token_ids [N, block] the block's tokens;
        candidates [N, L, C] have the target's ids, and the ids of the head are draft_ids.
        """
        g, head = self._g, self._head
        before = self._tokens_before(token_ids, candidates)
        left = g.op("Gather", [self._parts.weight(head.left), before], ["pairs.left"], axis=0)
        if head.projection is not None:
            projected = self._for_candidates(self._parts.product(hidden, head.projection, "pairs.projected"))
            left = g.op("Mul", [left, projected], ["pairs.scaled"])
        if head.gate is not None and head.gate_bias is not None:
            left = g.op("Mul", [left, self._opened(hidden, left, head.gate, head.gate_bias)], ["pairs.gated"])
        right = g.op("Gather", [self._parts.weight(head.right), draft_ids], ["pairs.right"], axis=0)
        for factor, name in ((left, names.LEFT), (right, names.RIGHT)):
            g.cast(factor, "float32", name)
            g.output(name, "float32", ["N", length, head.candidates, head.rank])

    def _tokens_before(self, token_ids: str, candidates: str) -> str:
        """The tokens that candidates [N, L, C] may follow: C times the bonus token, then the candidates before."""
        g, count = self._g, self._head.candidates
        column = g.constant(f"first_column.{count}", np.zeros(count, np.int64))
        bonus = g.op("Gather", [token_ids, column], ["pairs.bonus"], axis=1)
        first = g.reshape(bonus, [0, 1, count], "pairs.first")
        others = g.rows_between(candidates, 0, -1, "pairs.others")
        return g.concat([first, others], "pairs.before", axis=1)

    def _opened(self, hidden: str, left: str, gate: Part, bias: Part) -> str:
        """How far the gate is open for each token before, [N, L, C, r]: σ(G · [h; e] + g)."""
        g = self._g
        width = gate.shape[1] - self._head.rank
        of_hidden = self._parts.weight(gate, ".hidden", lambda w: w[:, :width].T)
        of_token = self._parts.weight(gate, ".token", lambda w: w[:, width:].T)
        states = self._for_candidates(g.product(hidden, of_hidden, "gate.hidden"))
        both = g.op("Add", [g.product(left, of_token, "gate.token"), states], ["gate.both"])
        biased = g.op("Add", [both, self._parts.weight(bias)], ["gate.biased"])
        return g.op("Sigmoid", [biased], ["gate.opened"])

    def _for_candidates(self, x: str) -> str:
        """x [N, L, r] as [N, L, 1, r]."""
        return self._g.reshape(x, [0, 0, 1, self._head.rank], f"{x}.for_candidates")


class Convolutions:
    """The convolutions of a drafter's layers, over the rows of a block."""

    def __init__(self, g: Graph, dims: DrafterDims, weights: Weights, prefix: str) -> None:
        self._g = g
        self._dims = dims
        self._parts = _Parts(g, weights, prefix)

    def around(self, index: int, place: str, x: str, sublayer: Callable[[str], str]) -> str:
        """The sublayer of layer `index` with the convolution of `place` on its input x [N, block, H] and on its output;
        the sublayer alone where the drafter has none."""
        convolution = self._dims.convolution
        if convolution is None:
            return sublayer(x)
        g, taps = self._g, convolution.taps
        parts, out = layer_convolutions(self._dims, index)[place], f"layers.{index}.{place}"
        both = self._parts.product(x, parts.kernels, f"{out}.dynamic")
        dynamic = g.split(both, [convolution.groups] * 2 * taps, [f"{out}.dynamic.{i}" for i in range(2 * taps)])
        kernels = [self._kernel(convolution, parts.base, i, kernel) for i, kernel in enumerate(dynamic)]
        inner = sublayer(self._convolved(x, kernels[:taps], f"{out}.in"))
        return self._convolved(inner, kernels[taps:], f"{out}.out")

    def _kernel(self, convolution: Convolution, base: Part, index: int, dynamic: str) -> str:
        """The kernel [N, block, groups, H / groups] of a side and tap, from its dynamic part [N, block, groups]."""
        g, groups, taps = self._g, convolution.groups, convolution.taps

        def still(weight: np.ndarray) -> np.ndarray:
            return weight[index // taps, index % taps].reshape(groups, -1)

        by_group = g.reshape(dynamic, [0, 0, groups, 1], f"{dynamic}.by_group")
        return g.op("Add", [by_group, self._parts.weight(base, f".{index}", still)], [f"{dynamic}.kernel"])

    def _convolved(self, x: str, kernels: Sequence[str], out: str) -> str:
        """x [N, block, H] under the kernels of one side, one per tap; rows before the block are zeros."""
        g, size = self._g, self._dims.hidden_size
        groups = self._dims.convolution.groups if self._dims.convolution else 1
        rows = g.reshape(x, [0, 0, groups, size // groups], f"{out}.by_group")
        total = g.op("Mul", [kernels[0], rows], [f"{out}.0"])
        for tap in range(1, min(len(kernels), self._dims.block_size)):
            pads = g.constant(f"pads.{tap}", np.array([0, tap, 0, 0, 0, 0, 0, 0], np.int64))
            earlier = g.op("Pad", [g.rows_between(rows, 0, -tap, f"{out}.{tap}.kept"), pads], [f"{out}.{tap}.rows"])
            weighted = g.op("Mul", [kernels[tap], earlier], [f"{out}.{tap}.weighted"])
            total = g.op("Add", [total, weighted], [f"{out}.{tap}"])
        return g.reshape(total, [0, 0, self._dims.hidden_size], out)
