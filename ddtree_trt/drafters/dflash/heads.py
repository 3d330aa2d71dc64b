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
from typing import Annotated, NamedTuple

from ddtree_trt.models.decoder import Part, TransformerDims
from ddtree_trt.reading import Between

RANK = Between(1, 1 << 16)
TAPS = Between(1, 64)
# C of a Markov head, as far as the vocabulary goes. The rest of the vocabulary counts as impossible.
MARKOV_CANDIDATES = 64

MARKOV_LEFT = "markov_head.markov_w1.weight"
MARKOV_RIGHT = "markov_head.markov_w2.weight"
MARKOV_GATE = "markov_head.gate_proj.weight"
MARKOV_GATE_BIAS = "markov_head.gate_proj.bias"
SELECTOR_LEFT = "candidate_selector.predecessor_codebook"
SELECTOR_RIGHT = "candidate_selector.successor_codebook"
SELECTOR_PROJECTION = "candidate_selector.hidden_projection.weight"


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


def markov_head(dims: TransformerDims, rank: int, head_size: int, *, gated: bool) -> PairHead:
    """The Markov head over a draft vocabulary of `head_size` tokens, V'."""
    return PairHead(
        candidates=min(MARKOV_CANDIDATES, head_size),
        left=Part("pairs.left", {MARKOV_LEFT: (dims.vocab_size, rank)}),
        right=Part("pairs.right", {MARKOV_RIGHT: (head_size, rank)}),
        gate=Part("pairs.gate", {MARKOV_GATE: (rank, dims.hidden_size + rank)}) if gated else None,
        gate_bias=Part("pairs.gate_bias", {MARKOV_GATE_BIAS: (rank,)}) if gated else None,
    )


def selector_head(dims: TransformerDims, selector: Selector, head_size: int) -> PairHead:
    """The candidate selector over a draft vocabulary of `head_size` tokens, V'."""
    return PairHead(
        candidates=selector.top,
        left=Part("pairs.left", {SELECTOR_LEFT: (dims.vocab_size, selector.rank)}),
        right=Part("pairs.right", {SELECTOR_RIGHT: (head_size, selector.rank)}),
        projection=Part("pairs.projection", {SELECTOR_PROJECTION: (selector.rank, dims.hidden_size)}),
    )


def convolution_parts(dims: TransformerDims, convolution: Convolution, place: str, prefix: str) -> ConvolutionParts:
    """The tensors of the convolution at `place`, ATTENTION or MLP, of the layer whose tensors begin with `prefix`."""
    name, taps, hidden = f"{place}_conv", convolution.taps, dims.hidden_size
    base = {f"{prefix}{name}.base_kernel": (2, taps, hidden)}
    kernels = {f"{prefix}{name}.kernel_projection.weight": (2 * taps * convolution.groups, hidden)}
    return ConvolutionParts(Part(f"{name}.base", base), Part(f"{name}.kernels", kernels))
