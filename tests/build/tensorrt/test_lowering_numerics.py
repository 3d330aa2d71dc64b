"""The TensorRT graphs of both lowerings, a plugin given a body of ONNX operators, against the ONNX Runtime engine:
branching trees, batches of slots of different lengths, compaction, and the drafter on top of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from checkpoints import BY_SWITCHES, SCALINGS, make_drafter, make_target
from drafts import marginals
from engine_builds import PACKAGED, build_engine
from kernel_reference import attention, packed_mask
from lowered import LoweredPair, attention_body
from numerics import TOLERANCE, Array, path_to, random_tree
from onnx import TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.tree import token_chain

# What the plugin's kernels take: heads of 64 or 128. Half precision rounds at 2⁻¹¹ of each value, through every layer.
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"tied": False, "head_dim": 64, "num_heads": 4, "num_kv_heads": 1},
    "one-layer": {"num_layers": 1, "head_dim": 128, "num_heads": 2, "num_kv_heads": 2, "rope_theta": 1e6},
    "wide": {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "rms_norm_eps": 1e-5, "hidden_size": 48},
    "rope-yarn": {"head_dim": 64, "rope_scaling": SCALINGS["yarn"]},
    **{name: {"head_dim": 64, "family": family} for name, family in BY_SWITCHES.items()},
}
TOLERANCES = {"float32": TOLERANCE, "float16": 1e-2}
TREE_BUDGET = 40
LOWERINGS = (pytest.param(PluginGraph, id="plugin"), pytest.param(NativeGraph, id="native"))


class Beside:
    """The lowered pair and the engine: what is done is done to both."""

    def __init__(self, lowered: LoweredPair, engine: OrtEngine, tolerance: float) -> None:
        self.lowered, self.engine, self.tolerance = lowered, engine, tolerance
        self.rng = np.random.default_rng(3)
        self.vocab = engine.manifest.target_dims.vocab_size

    def close(self, found: Array, expected: Array, what: str) -> None:
        assert found.shape == expected.shape, f"{what}: {found.shape} for {expected.shape}"
        error = np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected)))
        assert error <= self.tolerance, f"{what}: off by {error:.1e} of the scale"

    def prefill(self, slot: int, size: int) -> None:
        tokens = self.rng.integers(0, self.vocab, size)
        expected = self.engine.prefill(slot, tokens, rows="all", taps=True).logits
        self.close(self.lowered.prefill(slot, tokens), np.asarray(expected), f"prefill of {size} in slot {slot}")

    def round(self, nodes: dict[int, int]) -> None:
        """Trees of so many nodes by slot in one pass; a random path of each is kept."""
        trees = {slot: random_tree(self.rng, n, self.vocab) for slot, n in nodes.items()}
        found = self.lowered.verify(trees)
        for slot, tree in trees.items():
            (verdict,) = self.engine.verify([VerifyRequest(slot, tree)])
            choices, logits = found[slot]
            self.close(logits, np.asarray(verdict.logits), f"tree of {len(tree)} in slot {slot}")
            np.testing.assert_array_equal(choices, logits.argmax(-1))
            assert choices.dtype == np.int32
            path = path_to(tree, int(self.rng.integers(len(tree))))
            self.lowered.commit(slot, path)
            self.engine.commit(slot, path, taps=True)

    def draft(self, *slots: int) -> None:
        """Slots with equally many new states, in one pass."""
        log_probs, candidates = self.lowered.draft(slots, bonus=5)
        k = min(TREE_BUDGET, self.vocab)
        assert log_probs.shape[-1] == k and candidates.dtype == np.int32
        everything = [DraftRequest(slot, 5, self.vocab, 1) for slot in slots]
        for n, draft in enumerate(self.engine.draft(everything)):
            truth = np.empty_like(marginals(draft).log_probs)
            np.put_along_axis(truth, marginals(draft).token_ids, marginals(draft).log_probs, axis=-1)
            what = f"draft {n} of {len(slots)}"
            self.close(log_probs[n], marginals(draft).log_probs[:, :k], what)
            self.close(log_probs[n], np.take_along_axis(truth, candidates[n], axis=-1), f"{what}, by token")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((*lowering.values, name, floats), marks=lowering.marks, id=f"{lowering.id}-{name}-{floats}")
        for lowering in LOWERINGS
        for floats, networks in (("float32", ("tiny", *SHAPES)), ("float16", ("tiny", *BY_SWITCHES)))
        for name in networks
    ],
)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    lowering, name, floats = request.param
    path = tmp_path_factory.mktemp("lowered")
    target, drafter = PACKAGED / "target", PACKAGED / "drafter"
    if name != "tiny":
        dims = {"max_positions": 128, **SHAPES[name]}
        target = make_target(path / "target", **dims)
        dims.pop("tied", None)
        layers = dims.get("num_layers", 3)
        taps = {"tap_layers": (0, layers - 1) if layers > 1 else (0,), "num_target_layers": layers}
        drafter = make_drafter(path / "drafter", **{**dims, **taps, "num_layers": 2})
    limits: dict[str, Any] = {"max_batch": 3, "max_tree_budget": TREE_BUDGET, "max_seq_len": 128}
    engine = build_engine(target, drafter, path / "engine", **limits)
    pair = load_checkpoint(target), load_checkpoint(drafter)
    lowered = LoweredPair(path / "graphs", *pair, engine.manifest.limits, floats, lowering)
    return Beside(lowered, engine, TOLERANCES[floats])


def test_rounds_beside_the_engine(beside: Beside) -> None:
    """Prompts of different lengths, then rounds over one slot, all slots and some, each behind what was compacted."""
    for slot, size in enumerate((7, 1, 33)):
        beside.prefill(slot, size)
    beside.draft(0)
    beside.draft(2)
    beside.draft(1)
    beside.round({0: 20, 1: 41, 2: 3})
    beside.round({2: 17, 0: 17})
    beside.draft(1)
    beside.prefill(1, 4)
    beside.round({1: 1})
    beside.draft(2)


def test_drafts_of_slots_with_equally_many_new_states(beside: Beside) -> None:
    for slot in range(3):
        beside.lowered.target.lengths[slot] = beside.lowered.drafter.lengths[slot] = 0
        beside.lowered.states[slot].clear()
        beside.engine.truncate(slot, 0)
    for slot, size in enumerate((9, 4, 9)):
        beside.prefill(slot, size)
    beside.draft(2, 0)
    beside.draft(1)


@pytest.mark.parametrize("mode", list(MaskMode))
def test_the_body_is_what_the_kernels_compute(mode: MaskMode) -> None:
    """The stand-in for the plugin against the reference the kernels are tested against."""
    rng = np.random.default_rng(5)
    n, t, heads, kv, d, slots, s = 2, 37, 4, 2, 8, 3, 64
    q, k, v = (rng.standard_normal((n, t, rows, d)).astype(np.float32) for rows in (heads, kv, kv))
    past_k, past_v = (rng.standard_normal((slots, kv, s, d)).astype(np.float32) for _ in range(2))
    parents = np.array([-1, *(int(rng.integers(i)) for i in range(1, t))], np.int32)
    mask = np.stack([packed_mask(parents, 2), packed_mask(parents[::-1] * 0 - 1, 2)])
    slot_ids, past_len = np.array([2, 0], np.int32), np.array([11, 0], np.int32)
    scale = 0.37
    expected = attention(q, k, v, past_k, past_v, slot_ids, past_len, mask, mode, scale)
    attrs: dict[str, Any] = dict.fromkeys(plugins.ATTENTION_ATTRIBUTES, 1) | {plugins.SCALE: scale}
    inputs = [f"x{i}" for i in range(8)]
    node = helper.make_node(
        plugins.ATTENTION, inputs, ["a", "b", "c"], domain="ddtree", plugin_namespace="", plugin_version="", **attrs
    )
    kinds = [TensorProto.FLOAT] * 5 + [TensorProto.INT32] * 3
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(inputs, kinds, strict=True)]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "abc"]
    graph = helper.make_graph([node], "one", values, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ddtree", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[attention_body(mode)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip(inputs, [q, k, v, past_k, past_v, slot_ids, past_len, mask], strict=True)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_keep_what_float32_sums(tied: bool, lowering: type[TensorRtGraph], tmp_path: Path) -> None:
    """In half precision too: the head's products and sums are float32, though its inputs are rounded. Large logits of
    different tokens, a half's step apart or less, stay apart."""
    target = load_checkpoint(make_target(tmp_path / "t", tied=tied, head_dim=64, num_heads=2, num_kv_heads=1))
    drafter = load_checkpoint(make_drafter(tmp_path / "d", head_dim=64, num_heads=2, num_kv_heads=1))
    limits = Limits(max_seq_len=64, max_batch=1, max_tree_budget=8, prefill_chunk=16)
    pair = LoweredPair(tmp_path / "graphs", target, drafter, limits, "float16", lowering)
    table = 64 * pair.tables[names.HEAD].astype(np.float16).astype(np.float32)
    # Two tokens whose rows differ by the last bit of one value, and large logits, where halves have steps of 2⁻⁶.
    table[-1] = table[7]
    table[-1, 0] = np.nextafter(table[7, 0].astype(np.float16), np.float16(np.inf))
    pair.tables[names.HEAD] = table
    choices, logits = pair.verify({0: token_chain(np.arange(3, 12))})[0]
    assert logits.dtype == np.float32
    rounded = logits.astype(np.float16).astype(np.float32)
    assert np.abs(logits).max() > 16
    assert (logits != rounded).mean() > 0.9, "logits that went through halves"
    assert (logits[:, 7] != logits[:, -1]).all()
    assert (rounded[:, 7] == rounded[:, -1]).any(), "these rows are not near enough to tell"
    np.testing.assert_array_equal(choices, logits.argmax(-1))
