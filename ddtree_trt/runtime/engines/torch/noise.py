"""The noise of `cpp_plugins/include/ddtree/noise.h` as tensors: the same numbers on a device as on the host.

With Gumbel noise g, argmax(logits + temperature · g) is a draw from softmax(logits / temperature). Here g is a function
of the request's seed, the token's position and its id: the draw does not depend on the tree a token is in, or on
whether it was drafted, so that every method gives the same text. Numbers come from SplitMix64 (Steele, Lea, Flood
2014), whose state is a counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_TOKEN_BITS = 24  # of the counter; the other bits are the position
_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def noise_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """64 bits as int64 [N, P, V] for seeds int64 [N] and positions int [N, P] of the tokens to be drawn."""
    token = torch.arange(vocab_size, device=seeds.device)
    counter = (positions.long() << _TOKEN_BITS)[..., None] + token
    x = seeds[:, None, None] + (counter + 1) * _signed(_GAMMA)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST_FACTOR)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND_FACTOR)
    return x ^ _shifted(x, 31)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float32 [N, P, V], all finite: between −2.9 and 43.7."""
    # Uniform in (0, 1), exact near 0, where the noise is largest.
    uniform = (_shifted(noise_bits(seeds, positions, vocab_size), 1) | 1).float() * 2.0**-63
    return -torch.log(-torch.log1p(-uniform.clamp_(max=_BELOW_ONE)))


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit number; products wrap around."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
