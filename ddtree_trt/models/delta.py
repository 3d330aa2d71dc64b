"""Gated delta-net layers, most layers of a hybrid model (arXiv 2412.06464): their dimensions.

Such a layer has no keys and values of the past but, for each value head, a state S [Dk, Dv]. A row moves it by
S ← a·S + b·k (v − a·Sᵀk)ᵀ and reads o = Sᵀq; a = exp(g) ≤ 1 is its decay, b in 0 … 1 its step, k and q have norm 1,
and q is scaled by Dk^−½. Queries, keys and values pass through a causal convolution of a few rows and silu before, and
o through a norm gated by silu(z) behind. In a tree a row's state, and its inputs of the convolution, are its parent's.
"""

from dataclasses import dataclass
from typing import Annotated

from ddtree_trt.reading import Between

STATE_HEADS = Between(1, 4096)
STATE_DIM = Between(1, 4096)
TAPS = Between(2, 16)
LAYER = Between(0, 999)


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta-net layers of a hybrid, which are all that `attention_layers` does not name.

    These families also gate the output of attention by a sigmoid, and their norms have weights around 0; a checkpoint's
    reader adds the 1.
    """

    key_heads: Annotated[int, STATE_HEADS]  # Hk
    value_heads: Annotated[int, STATE_HEADS]  # Hv: each key head serves Hv / Hk of them, one after the other
    key_dim: Annotated[int, STATE_DIM]  # Dk
    value_dim: Annotated[int, STATE_DIM]  # Dv
    taps: Annotated[int, TAPS]  # rows of the convolution, the last its own
    attention_layers: tuple[Annotated[int, LAYER], ...]  # rising
    interleaved: bool = False  # checkpoints have the rows of its projections key head by key head, in two tensors

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: width of what passes through the convolution, queries, keys and values side by side."""
        return sum(self.widths)

    @property
    def projected_widths(self) -> tuple[int, int, int, int]:
        """Widths of what one product computes side by side: inputs of the convolution, gates z, steps b and decays a
        before their nonlinearities."""
        return self.channels, self.widths[2], self.value_heads, self.value_heads

    @property
    def state_values(self) -> int:
        """Float32 values that a slot keeps for a layer: the states [Hv, Dk, Dv], and the convolution's last inputs
        [taps − 1, C], the oldest first."""
        return self.value_heads * self.key_dim * self.value_dim + (self.taps - 1) * self.channels

    @property
    def moved_values(self) -> int:
        """Float32 values of a row that a commit needs: its inputs of the convolution [C]; queries, keys and values as
        they move the state [C]; decays and steps [Hv] each."""
        return 2 * (self.channels + self.value_heads)

    def contradiction(self, layers: int) -> str | None:
        """What cannot be true together in a network of so many layers, or None: each field is right by itself."""
        if self.value_heads % self.key_heads:
            return f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}"
        if list(self.attention_layers) != sorted({*self.attention_layers} & {*range(layers)}):
            return f"attention_layers {list(self.attention_layers)} are not rising layers of {layers}"
        return None
