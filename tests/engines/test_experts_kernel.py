"""The mixture of experts as ONNX Runtime computes it within a network, against NumPy in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from ddtree_trt.build.graph.lowering_onnxruntime import OnnxRuntimeGraph
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.models.decoder import Experts

LAYERS = 2
Weights = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]  # router [H, E], gate and up, down


def random_layers(rng: np.random.Generator, experts: Experts, hidden: int, inner: int) -> list[Weights]:
    def drawn(*shape: int, inputs: int = hidden) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(inputs)).astype(np.float32)

    def layer(count: int) -> Weights:
        return drawn(hidden, count), drawn(count, 2 * inner, hidden), drawn(count, hidden, inner, inputs=inner)

    return [layer(experts.count) for _ in range(LAYERS)]


def session_of(path: Path, layers: list[Weights], experts: Experts, threads: int) -> onnxruntime.InferenceSession:
    """x [N, T, H] plus, layer by layer, the mixture of twice of what there is. Nothing else reads an input of a
    mixture after it, so that the runtime may put the result in its place."""
    hidden = len(layers[0][0])
    with WeightFile(path / "weights.bin") as weights:
        g = OnnxRuntimeGraph("mixtures", weights)
        x = g.input("x", "float32", ["N", "T", hidden])
        for index, (router, gate_up, down) in enumerate(layers):
            twice = g.op("Add", [x, x], [f"{index}.twice"])
            logits = g.product(twice, g.weight(f"{index}.router", router.view), f"{index}.logits")
            made = (gate_up.view, down.view)
            mixed = g.experts(twice, logits, f"{index}", made, experts, f"{index}.mixed")
            x = g.op("Add", [x, mixed], [f"{index}.sum"])
        g.output(x, "float32", ["N", "T", hidden])
        model = g.model()
    (path / "m.onnx").write_bytes(model.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path / "m.onnx", options, providers=["CPUExecutionProvider"])


def expected(x: NDArray[np.float32], layers: list[Weights], experts: Experts) -> tuple[NDArray[np.float64], Any]:
    """What the network returns for x [R, H], and per row whether any choice of experts is too close to be compared."""
    rows, close = x.astype(np.float64), np.zeros(len(x), bool)
    for router, gate_up, down in layers:
        twice = 2 * rows
        logits = twice @ router
        falling = np.argsort(-logits, axis=1)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        k, mixed = experts.per_token, np.zeros_like(rows)
        if k < experts.count:
            last, next_one = (np.take_along_axis(logits, falling[:, i : i + 1], 1)[:, 0] for i in (k - 1, k))
            close |= last - next_one < 1e-5 * (1 + np.abs(logits).max(1))
        for row, chosen in enumerate(falling[:, :k]):
            total = shares[row, chosen].sum() if experts.normalised else 1.0
            for expert in chosen:
                gate, up = np.split(gate_up[expert].astype(np.float64) @ twice[row], 2)
                inner = gate * (1 + np.tanh(gate / 2)) / 2 * up  # silu without overflow
                mixed[row] += shares[row, expert] / total * (down[expert].astype(np.float64) @ inner)
        rows = rows + mixed
    return rows, close


@pytest.mark.parametrize("seed", range(8))
def test_random_networks(seed: int, tmp_path: Path) -> None:
    """Sizes that are multiples of nothing, rows from 1 to 257, and the same bits in every repetition."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 41))
    experts = Experts(count, int(rng.integers(1, count + 1)) if seed % 2 else min(count, 8), seed % 4 < 2)
    hidden, inner = (int(size) for size in rng.integers(1, 71, 2))
    layers = random_layers(rng, experts, hidden, inner)
    session = session_of(tmp_path, layers, experts, threads=1 + seed % 2)
    compared = 0
    for rows in (1, 2, int(rng.integers(3, 60)), 257):
        sequences = 2 if rows < 60 else 1
        scale = rng.choice([0.1, 1.0, 4.0])
        x = (scale * rng.standard_normal((sequences, rows, hidden))).astype(np.float32)
        truth, close = expected(x.reshape(-1, hidden), layers, experts)
        (first,) = session.run(None, {"x": x})
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], first)
        found = first.reshape(-1, hidden)[~close]
        error = np.abs(found - truth[~close]).max(1) / (np.abs(truth[~close]).max(1) + scale)
        assert error.max(initial=0) < 1e-3, (experts, hidden, inner, rows, scale)
        compared += len(found)
    assert compared > 250
