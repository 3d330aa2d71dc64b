"""Heads of a block drafter whose children depend on their parent, and its convolutions: records, tensors, formulas.

A head turns the logits of position t into scores of pairs. With a the token at position t − 1 (before the first
position the bonus token), b a candidate at position t, h the normed hidden state of t's row and e = left[a]:

    score(a → b) = unary[t, b] + ⟨f(e, h), right[b]⟩

    Markov head (DSpark):        f = e
    gated Markov head (DSpark):  f = σ(G · [h; e] + g) ⊙ e
    selector (DFlash2):          f = e ⊙ (P · h)

The probability of b after a is the softmax of the scores over the candidates of t, the largest C logits. A selector
states C; it was trained with that many. A Markov head was trained over the vocabulary; see `MARKOV_CANDIDATES`.

A convolution runs around every sublayer, over the rows of the block alone: x_i = 0 before the block's first row, and
rows of the context do not pass through it. With x the normed input of the sublayer, c = K · x of shape
[2, taps, groups], and ⊙ over the H / groups neighbouring channels of a group:

    conv(side, x)_i = Σ_t (base[side, t] + c_i[side, t]) ⊙ x_{i−t}
    sublayer'(x) = conv(1, sublayer(conv(0, x)))         both with the c of x

Sources: the Markov heads of DeepSpec and SpecForge; DFlash2 in z-lab's DFlash and in vLLM.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from ddtree_trt.models.decoder import Part
from ddtree_trt.reading import Between

RANK = Between(1, 1 << 16)
TAPS = Between(1, 64)
# C of a Markov head, as far as the vocabulary goes. The rest of the vocabulary counts as impossible.
MARKOV_CANDIDATES = 64


@dataclass(frozen=True)
class Selector:
    """A selector that scores each candidate by the one chosen before it."""

    top: Annotated[int, RANK]  # C: candidates of a position
    rank: Annotated[int, RANK]  # r: width of its two codebooks


@dataclass(frozen=True)
class Convolution:
    """Convolutions around every sublayer, over the rows of the block."""

    taps: Annotated[int, TAPS]  # rows that one result is made of
    groups: Annotated[int, RANK]  # parts of a row, each with its own dynamic kernel


@dataclass(frozen=True)
class PairHead:
    """The tensors of a head of any kind, and the number of candidates that it scores."""

    candidates: int  # C
    left: Part  # [V, r], by the token before
    right: Part  # [V', r], by the candidate
    projection: Part | None = None  # P [r, H]
    gate: Part | None = None  # G [r, H + r]
    gate_bias: Part | None = None  # g [r]

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def parts(self) -> tuple[Part, ...]:
        parts = (self.left, self.right, self.projection, self.gate, self.gate_bias)
        return tuple(part for part in parts if part is not None)


class ConvolutionParts(NamedTuple):
    base: Part  # [2 · taps, H]: of the sublayer's input, then of its output
    kernels: Part  # K [2 · taps · groups, H]


def pair_head(dims: Any) -> PairHead | None:
    """The head for pairs of a `DFlashDims`; None where a position's candidates depend on none before."""

    def part(name: str, source: str, *shape: int) -> Part:
        return Part(f"pairs.{name}", {source: shape})

    if (selector := dims.selector) is not None:
        rank = selector.rank
        return PairHead(
            candidates=selector.top,
            left=part("left", "candidate_selector.predecessor_codebook", dims.vocab_size, rank),
            right=part("right", "candidate_selector.successor_codebook", dims.head_size, rank),
            projection=part("projection", "candidate_selector.hidden_projection.weight", rank, dims.hidden_size),
        )
    if not (rank := dims.markov_rank):
        return None
    gate = part("gate", "markov_head.gate_proj.weight", rank, dims.hidden_size + rank)
    return PairHead(
        candidates=min(MARKOV_CANDIDATES, dims.head_size),
        left=part("left", "markov_head.markov_w1.weight", dims.vocab_size, rank),
        right=part("right", "markov_head.markov_w2.weight", dims.head_size, rank),
        gate=gate if dims.markov_gated else None,
        gate_bias=part("gate_bias", "markov_head.gate_proj.bias", rank) if dims.markov_gated else None,
    )
