"""The DFlash drafter as an ONNX graph, with its heads and convolutions, whose weights are never rounded to 8 bits;
`heads.py` has the formulas of these."""

from collections.abc import Callable, Sequence

import numpy as np
from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.networks import DRAFT_IDS, TappedNetwork
from ddtree_trt.build.graph.ops import Graph
from ddtree_trt.drafters.dflash.dims import DFlashDims, context_norm, layer_convolutions
from ddtree_trt.drafters.dflash.heads import Convolution, PairHead
from ddtree_trt.models.decoder import ATTENTION, Part


def build(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    """C new context rows and one block [bonus, MASK, …] → top-K log-probabilities and the target's ids of L positions.

    Context rows are the tapped target states of committed tokens, projected by `fc` and normed; every layer appends
    their keys and values, then the block's, which the next call overwrites, and the block attends to those that the
    layer's mask allows. Context rows pass through the fused projection with the block, which costs their queries and
    saves a second matrix product per layer.
    """
    dims: DFlashDims = drafter.kind.dims
    block, eps = dims.block_size, dims.rms_norm_eps
    taps = g.states(names.TAPS, ["N", "C", dims.taps_width])
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", block])
    g.row_inputs("C+block", max(limits.prefill_chunk, block) + block, masked=False)
    net = _Network(g, drafter, target, limits)

    context = g.rms_norm(net.fused(taps), net.norm(context_norm(dims)), "context", eps)
    x = g.scaled(g.embed(net.embedding(), token_ids, "embedded"), dims.embedding_scale)
    h = g.rms_norm(x, net.norm(net.layers[0].input_norm), "layers.0.input", eps)
    for i in range(dims.num_layers):

        def attention(rows: str, i: int = i) -> str:
            layer = net.name(i)
            rows = g.after_contexts(context, rows, f"{layer}.rows")
            seen = g.block_attention(net.qkv(i, rows), net.cached(i), block, dims.mask(i), f"{layer}.attn")
            return net.project(i, seen)

        h, x = net.after_attention(i, net.around(i, ATTENTION, h, attention), x)
    drafting = h if dims.anchor_first else g.rows_from(h, 1, "masks")
    flat = g.reshape(drafting, [-1, dims.hidden_size], "hidden")
    logits = g.reshape(net.logits(flat, "flat_logits"), [-1, dims.draft_length, dims.head_size], "logits")
    if dims.pair_head is None:
        capped = g.capped(logits, dims.logit_scale, dims.logit_cap)
        net.add_most_probable(capped, "N", dims.draft_length)
    else:
        net.add_pairs(dims.pair_head, drafting, token_ids, logits)
    return g.model()


class _Network(TappedNetwork):
    dims: DFlashDims

    def part(self, part: Part, key: str = "", change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> str:
        """The part of the checkpoint as `change` returns it, under its checkpoint's name and `key`."""
        (source,) = part.sources
        return self.g.weight(f"{self.prefix}{source}{key}", lambda: np.ascontiguousarray(change(self.weights(source))))

    def part_product(self, x: str, part: Part, out: str) -> str:
        """x [..., in] times the part [out, in]."""
        return self.g.product(x, self.part(part, ".transposed", np.transpose), out)

    # The head for pairs

    def add_pairs(self, head: PairHead, hidden: str, token_ids: str, logits: str) -> None:
        """Add the outputs of logits [N, L, V']: the C largest, the target's ids of them, and the factors of the scores
        of pairs, float32 [N, L, C, r]. hidden [N, L, H] are the normed states of the rows that draft, token_ids
        [N, block] the block's tokens."""
        g, dims = self.g, self.dims
        shape: list[int | str] = ["N", dims.draft_length, head.candidates]
        g.op("TopK", [logits, g.number([head.candidates])], ["best_logits", f"{DRAFT_IDS}.wide"], axis=-1)
        g.cast(f"{DRAFT_IDS}.wide", g.integers, self.ids)
        self.add_target_ids()
        g.op("Identity", [g.capped("best_logits", dims.logit_scale, dims.logit_cap)], [names.UNARY])
        g.output(names.UNARY, "float32", shape)
        g.output(names.CANDIDATES, g.integers, shape)
        # The tokens that candidates may follow: C times the bonus token, then the candidates before.
        bonus = g.op("Gather", [token_ids, g.number([0] * head.candidates)], ["pairs.bonus"], axis=1)
        first = g.reshape(bonus, [0, 1, head.candidates], "pairs.first")
        others = g.rows_between(names.CANDIDATES, 0, -1, "pairs.others")
        before = g.concat([first, others], "pairs.before", axis=1)
        left = g.op("Gather", [self.part(head.left), before], ["pairs.left"], axis=0)
        if head.projection is not None:
            projected = self._for_candidates(head, self.part_product(hidden, head.projection, "pairs.projected"))
            left = g.op("Mul", [left, projected], ["pairs.scaled"])
        if head.gate is not None and head.gate_bias is not None:
            left = g.op("Mul", [left, self._opened(head, hidden, left, head.gate, head.gate_bias)], ["pairs.gated"])
        right = g.op("Gather", [self.part(head.right), self.ids], ["pairs.right"], axis=0)
        for factor, name in ((left, names.LEFT), (right, names.RIGHT)):
            g.cast(factor, "float32", name)
            g.output(name, "float32", [*shape, head.rank])

    def _opened(self, head: PairHead, hidden: str, left: str, gate: Part, bias: Part) -> str:
        """How far the gate is open for each token before, [N, L, C, r]: σ(G · [h; e] + g)."""
        g, width = self.g, gate.shape[1] - head.rank
        of_hidden = self.part(gate, ".hidden", lambda w: w[:, :width].T)
        of_token = self.part(gate, ".token", lambda w: w[:, width:].T)
        states = self._for_candidates(head, g.product(hidden, of_hidden, "gate.hidden"))
        both = g.op("Add", [g.product(left, of_token, "gate.token"), states], ["gate.both"])
        biased = g.op("Add", [both, self.part(bias)], ["gate.biased"])
        return g.op("Sigmoid", [biased], ["gate.opened"])

    def _for_candidates(self, head: PairHead, x: str) -> str:
        """x [N, L, r] as [N, L, 1, r]."""
        return self.g.reshape(x, [0, 0, 1, head.rank], f"{x}.for_candidates")

    # Convolutions

    def around(self, index: int, place: str, x: str, sublayer: Callable[[str], str]) -> str:
        """The sublayer with the convolution of `place`, if there is one, on its input x [N, block, H] and output."""
        convolution = self.dims.convolution
        if convolution is None:
            return sublayer(x)
        g, taps = self.g, convolution.taps
        parts, out = layer_convolutions(self.dims, index)[place], f"layers.{index}.{place}_conv"
        both = self.part_product(x, parts.kernels, f"{out}.dynamic")
        dynamic = g.split(both, [convolution.groups] * 2 * taps, [f"{out}.dynamic.{i}" for i in range(2 * taps)])
        kernels = []  # [N, block, groups, H / groups] of each side and tap
        for i, name in enumerate(dynamic):

            def still(weight: np.ndarray, i: int = i) -> np.ndarray:
                return weight[i // taps, i % taps].reshape(convolution.groups, -1)

            by_group = g.reshape(name, [0, 0, convolution.groups, 1], f"{name}.by_group")
            kernels.append(g.op("Add", [by_group, self.part(parts.base, f".{i}", still)], [f"{name}.kernel"]))
        inner = sublayer(self._convolved(convolution, x, kernels[:taps], f"{out}.in"))
        return self._convolved(convolution, inner, kernels[taps:], f"{out}.out")

    def _convolved(self, convolution: Convolution, x: str, kernels: Sequence[str], out: str) -> str:
        """x [N, block, H] under the kernels of one side, one per tap; rows before the block are zeros."""
        g, size, groups = self.g, self.dims.hidden_size, convolution.groups
        rows = g.reshape(x, [0, 0, groups, size // groups], f"{out}.by_group")
        total = g.op("Mul", [kernels[0], rows], [f"{out}.0"])
        for tap in range(1, min(len(kernels), self.dims.block_size)):
            kept = g.rows_between(rows, 0, -tap, f"{out}.{tap}.kept")
            earlier = g.op("Pad", [kept, g.number([0, tap, 0, 0, 0, 0, 0, 0])], [f"{out}.{tap}.rows"])
            weighted = g.op("Mul", [kernels[tap], earlier], [f"{out}.{tap}.weighted"])
            total = g.op("Add", [total, weighted], [f"{out}.{tap}"])
        return g.reshape(total, [0, 0, size], out)
