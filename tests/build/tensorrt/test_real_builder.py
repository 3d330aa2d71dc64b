"""Networks of the real structure through TensorRT's real parser and builder, those of TensorRT for RTX: no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import BY_SWITCHES, make_drafter, make_target, make_variant, reading_variant
from quantized import CASES, quantize
from real_builder import RealBuilder, rtx
from real_graphs import DIMS, LIMITS, ONE_SLOT, TAPS, Graphs

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.backends.tensorrt.plan import mend_attentions
from ddtree_trt.build.backends.tensorrt.plans import drafter_sizes, target_sizes
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import KEY_LENGTHS, NativeGraph, PluginGraph, TensorRtGraph
from ddtree_trt.build.graph.ops import Sink
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.errors import BuildError

pytestmark = pytest.mark.rtx
BOTH = pytest.mark.parametrize("lowering", [PluginGraph, NativeGraph])
# Lowering, precision, whether the head is the embedding, limits.
FORMS = pytest.mark.parametrize(
    ("lowering", "floats", "tied", "limits"),
    [
        (PluginGraph, "bfloat16", True, LIMITS),
        (NativeGraph, "bfloat16", True, LIMITS),
        (NativeGraph, "float16", False, ONE_SLOT),
    ],
    ids=["plugin-bf16-tied-slots", "native-bf16-tied-slots", "native-fp16-untied-one-slot"],
)


@pytest.fixture
def builder() -> RealBuilder:
    return RealBuilder()


def target_of(folder: Path, *, tied: bool = True) -> Checkpoint:
    return load_checkpoint(make_target(folder / "t", tied=tied, **DIMS))


@FORMS
def test_target(
    lowering: type[TensorRtGraph], floats: str, tied: bool, limits: Limits, builder: RealBuilder, tmp_path: Path
) -> None:
    graph = Graphs(tmp_path, lowering, floats, limits).target(target_of(tmp_path, tied=tied), TAPS["tap_layers"])
    network = builder.build(*graph, target_sizes(limits))
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    assert (names.SLOT_IDS in inputs) == (lowering is PluginGraph)
    assert {names.EMBEDDING, names.HEAD, names.TREE_MASK} <= inputs


@FORMS
def test_dflash_drafter(
    lowering: type[TensorRtGraph], floats: str, tied: bool, limits: Limits, builder: RealBuilder, tmp_path: Path
) -> None:
    drafter = load_checkpoint(make_drafter(tmp_path / "d", **{**DIMS, **TAPS}))
    graph = Graphs(tmp_path, lowering, floats, limits).drafter(drafter, target_of(tmp_path, tied=tied))
    builder.build(*graph, drafter_sizes(limits, drafter.kind.block_size))


@pytest.mark.parametrize(("lowering", "floats"), [(PluginGraph, "bfloat16"), (NativeGraph, "float16")])
@pytest.mark.parametrize(
    "fields",
    [
        {"markov_rank": 16},
        {"markov_rank": 16, "markov_gated": True},
        {"selector": Selector(16, 8), "convolution": Convolution(2, 4), "logit_cap": 9.0, "embedding_scale": 0.5},
    ],
    ids=["markov", "gated", "dflash2"],
)
def test_dflash_drafter_with_a_head_for_pairs(
    lowering: type[TensorRtGraph], floats: str, fields: dict[str, Any], builder: RealBuilder, tmp_path: Path
) -> None:
    dims = make_variant(tmp_path / "d", **{**DIMS, **TAPS, **fields})
    with reading_variant(tmp_path / "d", dims):
        drafter = load_checkpoint(tmp_path / "d")
    graph = Graphs(tmp_path, lowering, floats).drafter(drafter, target_of(tmp_path))
    network = builder.build(*graph, drafter_sizes(LIMITS, drafter.kind.block_size))
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    assert {names.UNARY, names.CANDIDATES, names.LEFT, names.RIGHT} <= outputs


@FORMS
def test_autoregressive_drafter(
    lowering: type[TensorRtGraph], floats: str, tied: bool, limits: Limits, builder: RealBuilder, tmp_path: Path
) -> None:
    drafter = load_checkpoint(make_target(tmp_path / "a", tied=tied, tokenizer=False, **DIMS))
    graph = Graphs(tmp_path, lowering, floats, limits).drafter(drafter, target_of(tmp_path))
    builder.build(*graph, drafter_sizes(limits, None))


@BOTH
@pytest.mark.parametrize("family", BY_SWITCHES)
def test_every_set_of_switches(
    lowering: type[TensorRtGraph], family: str, builder: RealBuilder, tmp_path: Path
) -> None:
    target = load_checkpoint(make_target(tmp_path / "t", family=BY_SWITCHES[family], **DIMS))
    builder.build(*Graphs(tmp_path, lowering, "bfloat16").target(target, (0,)), target_sizes(LIMITS))


def test_every_attention_reads_its_cache_as_far_as_it_is_written(builder: RealBuilder, tmp_path: Path) -> None:
    trt, (path, model) = rtx(), Graphs(tmp_path, NativeGraph, "bfloat16").target(target_of(tmp_path), ())
    network = builder.build(path, model, target_sizes(LIMITS))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    assert len(attentions) == DIMS["num_layers"]
    for n, layer in enumerate(attentions):
        layer.__class__ = trt.IAttentionInputLayer
        attention = layer.attention
        assert attention.key_value_lengths.name == KEY_LENGTHS and not attention.decomposable
        read = [attention.get_input(i).name for i in (1, 2)]
        assert read == [f"present_key.{n}", f"present_value.{n}"]
        assert attention.mask.dtype == trt.DataType.BOOL
        assert attention.get_input(0).name.endswith("rotated"), "nothing scales queries twice"


def test_an_attention_that_is_missing_is_named(builder: RealBuilder, tmp_path: Path) -> None:
    path, _ = Graphs(tmp_path, NativeGraph, "bfloat16").target(target_of(tmp_path), ())
    with pytest.raises(BuildError, match=r"no attention layer of the target's node 'another\.attn'"):
        mend_attentions(builder.trt, builder.parse(path), "target", ["another.attn"])
    with pytest.raises(BuildError, match=r"its graph does not have: 'model\.layers\.0\.attn\.by_head'"):
        mend_attentions(builder.trt, builder.parse(path), "target", [])


def test_an_attention_without_a_fused_kernel_is_named(builder: RealBuilder, tmp_path: Path) -> None:
    """There is none for float32."""
    graph = Graphs(tmp_path, NativeGraph, "float32").target(target_of(tmp_path), ())
    with pytest.raises(AssertionError, match=r"attention '.*layers\.0\.attn\.by_head' has no fused kernel for FLOAT"):
        builder.build(*graph, target_sizes(LIMITS))


@pytest.mark.parametrize("network", ["target", "drafter"])
def test_logits_are_float32_from_the_head_to_the_choice(network: str, builder: RealBuilder, tmp_path: Path) -> None:
    """The product, ArgMax and TopK in the parsed network, whose types the builder has to keep."""
    trt, graphs, target = rtx(), Graphs(tmp_path, NativeGraph, "bfloat16"), target_of(tmp_path)
    drafter = load_checkpoint(make_drafter(tmp_path / "d", **{**DIMS, **TAPS}))
    path, _ = graphs.target(target, ()) if network == "target" else graphs.drafter(drafter, target)
    parsed = builder.parse(path)
    layers = [parsed.get_layer(i) for i in range(parsed.num_layers)]
    (product,) = (
        layer
        for layer in layers
        if layer.type == trt.LayerType.MATRIX_MULTIPLY and layer.get_input(1).name == names.HEAD
    )
    (best,) = (layer for layer in layers if layer.type == trt.LayerType.TOPK)
    for tensor in (product.get_input(0), product.get_input(1), product.get_output(0), best.get_input(0)):
        assert tensor.dtype == trt.DataType.FLOAT, tensor.name


# Drafters with windows, causal layers and tables of their own

OWN = {"own_embedding": True, "own_head": True, "draft_vocab_size": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "windows and causal": {"windows": (12, 3), "causal": (True, False)},
    "own tables": {**OWN, "anchor_first": True},
    "mixed": {
        "num_layers": 5,
        "windows": (12, 0, 12, 5, 0),
        "causal": (True, True, False, True, False),
        **OWN,
    },
}


def test_a_drafter_in_bf16_beside_a_target_in_fp16(tmp_path: Path) -> None:
    """Tapped states and embeddings come in the target's type, caches are of the drafter's."""
    target = load_checkpoint(make_target(tmp_path / "t", **DIMS))
    drafter = load_checkpoint(make_drafter(tmp_path / "d", **{**DIMS, **TAPS}))

    def lowering(name: str, sink: Sink, floats: str) -> NativeGraph:
        return NativeGraph(name, sink, "bfloat16", floats)

    graph = Graphs(tmp_path, lowering, "float16").drafter(drafter, target)  # type: ignore[arg-type]
    network = RealBuilder().build(*graph, drafter_sizes(LIMITS, drafter.kind.block_size))
    types = {network.get_input(i).name: network.get_input(i).dtype for i in range(network.num_inputs)}
    halves = rtx().DataType.HALF, rtx().DataType.BF16
    assert (types[names.TAPS], types[names.EMBEDDING], types["past_key.0"]) == (halves[0], halves[0], halves[1])


@pytest.mark.parametrize(
    ("fields", "limits"), [*zip(VARIANTS.values(), (LIMITS, LIMITS, ONE_SLOT), strict=True)], ids=VARIANTS
)
def test_plans_of_variants(fields: dict[str, Any], limits: Limits, tmp_path: Path) -> None:
    """A plan whose attentions are fused under their masks, and whose outputs have the width of the drafter's head."""
    target = load_checkpoint(make_target(tmp_path / "t", tied=False, **DIMS))
    dims = make_variant(tmp_path / "d", **{**DIMS, **TAPS, **fields})
    with reading_variant(tmp_path / "d", dims):
        drafter = load_checkpoint(tmp_path / "d")
    graph = Graphs(tmp_path, NativeGraph, "bfloat16", limits).drafter(drafter, target)
    network = RealBuilder().build(*graph, drafter_sizes(limits, dims.block_size))
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    assert inputs[names.HEAD] == (dims.head_size, dims.hidden_size)
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    assert tuple(outputs[names.CANDIDATES].shape)[1] == dims.draft_length
    assert outputs[names.CANDIDATES].dtype == rtx().DataType.INT32


# Quantised checkpoints


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("lowering", "floats"), [(PluginGraph, "bfloat16"), (NativeGraph, "float16")])
def test_quantized_target(
    case: str,
    lowering: type[TensorRtGraph],
    floats: str,
    tmp_path: Path,
) -> None:
    algorithm, options = CASES[case]
    path = make_target(tmp_path / "t", **{**DIMS, "num_layers": 1})
    target = load_checkpoint(quantize(path, algorithm, **options))
    RealBuilder().build(*Graphs(tmp_path, lowering, floats).target(target, (0,)), target_sizes(LIMITS))
