"""Rotation of a network's residual stream, folded into its weights.

Hidden states of trained models have a few values that are many times larger than the others. A row of them has no good
scale in 8 bits. Multiplied by an orthogonal matrix the same row has values of about one size, and a network whose norms
are RMS norms computes the same with rotated states: what reads them is rotated back, and so is what writes them, once,
when the engine is built. This is the idea of QuaRot (arXiv 2404.00456).

The matrix is a discrete Hartley transform after a change of signs: it exists for every size, none of its values is
larger than sqrt(2/n), and a fast Fourier transform multiplies by it.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.models.decoder import BODY, TransformerDims, decoder_layers, final_norm

Floats = NDArray[np.float32]
Weights = Callable[[str], np.ndarray]  # Hugging Face tensor name → float32 array

_ROWS = 1024  # of a weight that are transformed at once, so that a copy in float64 stays small


def rotate(x: Floats, size: int) -> Floats:
    """Rows x [..., k · size] with each of their k parts multiplied by the matrix of that size."""
    signs = np.where(np.random.default_rng(size).random(size) < 0.5, -1.0, 1.0)
    parts = x.reshape(-1, size)
    rotated = np.empty(parts.shape, np.float32)
    for start in range(0, len(parts), _ROWS):
        waves = np.fft.rfft(parts[start : start + _ROWS] * signs, norm="ortho")
        mirrored = waves[:, 1 : (size + 1) // 2][:, ::-1]
        halves = waves.real - waves.imag, mirrored.real + mirrored.imag
        rotated[start : start + _ROWS] = np.concatenate(halves, axis=-1)
    return rotated.reshape(x.shape)


def rotation_matrix(size: int) -> Floats:
    """The orthogonal matrix [size, size] that `rotate` multiplies rows by."""
    return rotate(np.eye(size, dtype=np.float32), size)


def walsh(x: Floats, parts: int) -> Floats:
    """Rows x [..., k · parts], with a Walsh–Hadamard transform over their `parts`, a power of two: sqrt(parts) times an
    orthogonal matrix, and its own inverse but for the factor `parts`."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < parts:
        signs = np.block([[signs, signs], [signs, -signs]])
    return (signs @ x.reshape(*x.shape[:-1], parts, -1)).reshape(x.shape)


class Rotation:
    """A network whose residual stream, and the values of whose attention, are rotated; called with a Hugging Face name
    it returns that weight of the rotated network.

    Norms of the stream have no weights of their own: what follows them has taken these in, and the norm's output has
    a mean square of 1. The embedding, which a drafter reads too, stays as it is, and so does the last norm's weight:
    `into` and `out` are what rows are multiplied by in their place.
    """

    def __init__(self, dims: TransformerDims, weights: Weights, body: str = BODY) -> None:
        self._hidden, self._weights = dims.hidden_size, weights
        self._changes = defaultdict[str, list[Callable[[Floats], Floats]]](list)  # of each weight, in order
        (self._last_norm,) = final_norm(dims, body).sources
        self._changes[self._last_norm].append(np.ones_like)
        for layer in decoder_layers(dims, body):
            for norm, reader in ((layer.input_norm, layer.qkv), (layer.post_norm, layer.gate_up)):
                (before,) = norm.sources
                self._changes[before].append(np.ones_like)
                for name in reader.sources:
                    self._changes[name].append(partial(self._behind_norm, before))
            for name in layer.o.sources:  # they read attention's results
                self._changes[name].append(lambda w: rotate(w, dims.head_dim))
            for name in (*layer.o.sources, *layer.down.sources):  # they write the stream
                self._changes[name].append(lambda w: rotate(w.T, dims.hidden_size).T)
            for part in layer.projected:  # the last one is attention's values
                self._changes[part.sources[-1]].append(lambda w: rotate(w.T, dims.head_dim).T)

    def __call__(self, name: str) -> Floats:
        """The rotated weight, laid out as in the checkpoint."""
        weight: Floats = self._weights(name)
        for change in self._changes.get(name, ()):
            weight = change(weight)
        return weight

    def _behind_norm(self, norm: str, weight: Floats) -> Floats:
        return rotate(weight * self._weights(norm), self._hidden)

    def into(self) -> Floats:
        """The matrix [H, H] that rows of the embedding are multiplied by."""
        return rotation_matrix(self._hidden)

    def out(self) -> Floats:
        """The matrix [H, H] that multiplies the last norm's output by that norm's weight; rows stay rotated."""
        back = rotation_matrix(self._hidden).T
        return rotate(back * self._weights(self._last_norm), self._hidden)
