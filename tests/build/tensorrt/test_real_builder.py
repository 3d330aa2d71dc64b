"""Networks of the real structure through TensorRT's real parser and builder, those of TensorRT for RTX: no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BY_SWITCHES, DELTA, make_target, make_variant, reading_variant
from quantized import CASES, quantize
from real_builder import ONE_SLOT, Form, Lowered, rtx

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.backends.tensorrt.plans import mend_attentions
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import KEY_LENGTHS
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.errors import BuildError
from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.models.families import QWEN3_5

pytestmark = pytest.mark.rtx
DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128, "num_layers": 2}
TAPS: dict[str, Any] = {"tap_layers": (0, 1), "num_target_layers": 2}
FORMS = {
    "plugin": Form("plugin"),
    "native": Form("native"),
    "native-fp16-one-slot": Form("native", "fp16", ONE_SLOT),
    "native-fp16": Form("native", "fp16"),
}
OWN = {"own_embedding": True, "own_head": True, "draft_vocab_size": 40}
# Drafter → its fields, and the forms it is compiled in.
DRAFTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ("plugin", "native", "native-fp16-one-slot")),
    "gated": ({"markov_rank": 16, "markov_gated": True}, ("native-fp16",)),
    "dflash2": (
        {
            **{"selector": Selector(16, 8), "convolution": Convolution(2, 4), "logit_cap": 9.0, "embedding_scale": 0.5},
            "num_layers": 1,
        },
        ("plugin", "native-fp16"),
    ),
    "own tables": ({**OWN, "anchor_first": True}, ("native",)),
    "mixed": (
        {"num_layers": 4, "windows": (12, 0, 5, 0), "causal": (True, True, False, False), **OWN},
        ("native-fp16-one-slot",),
    ),
}


def target_of(folder: Path, **dims: Any) -> Checkpoint:
    return load_checkpoint(make_target(folder / "t", **{**DIMS, **dims}))


def drafter_of(folder: Path, **fields: Any) -> Checkpoint:
    dims = make_variant(folder / "d", **{**DIMS, **TAPS, **fields})
    with reading_variant(folder / "d", dims):
        return load_checkpoint(folder / "d")


def ends(network: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its inputs and outputs by name."""
    inputs = (network.get_input(i) for i in range(network.num_inputs))
    outputs = (network.get_output(i) for i in range(network.num_outputs))
    return {i.name: i for i in inputs}, {o.name: o for o in outputs}


def check_target(folder: Path, target: Checkpoint, form: Form) -> None:
    """Of TensorRT's attentions each reads its cache as far as it is written."""
    trt, network = rtx(), Lowered(folder, target, drafter_of(folder), "target", form).compile()
    inputs, _ = ends(network)
    assert (names.SLOT_IDS in inputs) == (form.attention == "plugin")
    assert {names.EMBEDDING, names.HEAD, names.TREE_MASK} <= set(inputs)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    assert len(attentions) == (target.dims.num_layers if form.attention == "native" else 0)
    for n, layer in enumerate(attentions):
        layer.__class__ = trt.IAttentionInputLayer
        attention = layer.attention
        assert attention.key_value_lengths.name == KEY_LENGTHS and not attention.decomposable
        read = [attention.get_input(i).name for i in (1, 2)]
        assert read == [f"present_key.{n}", f"present_value.{n}"]
        assert attention.mask.dtype == trt.DataType.BOOL
        assert attention.get_input(0).name.endswith("rotated"), "nothing scales queries twice"


@pytest.mark.parametrize("form", ["plugin", "native", "native-fp16-one-slot"])
def test_target(form: str, tmp_path: Path) -> None:
    check_target(tmp_path, target_of(tmp_path, tied="fp16" not in form), FORMS[form])


@pytest.mark.parametrize(("family", "form"), [*zip(BY_SWITCHES, ("plugin", "native"), strict=True)])
def test_every_set_of_switches(form: str, family: str, tmp_path: Path) -> None:
    check_target(tmp_path, target_of(tmp_path, family=BY_SWITCHES[family], num_layers=1), FORMS[form])


@pytest.mark.parametrize("form", ["native", "native-fp16-one-slot"])
def test_a_hybrid_and_its_commits(form: str, tmp_path: Path) -> None:
    """States are float32 inputs, which a commit updates as it does caches: it has no other way to write in place."""
    trt, target = rtx(), target_of(tmp_path, family=QWEN3_5, delta=replace(DELTA, attention_layers=(1,)))
    drafter, types = drafter_of(tmp_path), trt.DataType
    inputs, outputs = ends(Lowered(tmp_path, target, drafter, "target", FORMS[form]).compile())
    assert {names.PARENTS, "past_state.0", "past_inputs.0", "past_key.0"} <= set(inputs)
    assert outputs[names.kept_name(0)].dtype == inputs["past_state.0"].dtype == types.FLOAT
    (tmp_path / "commit").mkdir()
    network = Lowered(tmp_path / "commit", target, drafter, "compaction", FORMS[form]).compile()
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = {layer.get_output(0).name for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE}
    assert {"present_state.0", "present_inputs.0", "present_key.0"} <= updates == set(ends(network)[1])


def test_a_hybrid_of_published_heads(tmp_path: Path) -> None:
    """Of Qwen3.5-9B, in passes of up to 257 rows of 4 slots."""
    delta, form = DeltaNet(16, 32, 128, 128, 4, (1,)), Form(limits=Limits(max_seq_len=4096, max_batch=4))
    heads: dict[str, Any] = {"head_dim": 256, "num_heads": 16, "num_kv_heads": 4, "rotary_dim": 64}
    target = target_of(tmp_path, family=QWEN3_5, delta=delta, **heads)
    for name in ("target", "compaction"):
        (tmp_path / name).mkdir()
        Lowered(tmp_path / name, target, drafter_of(tmp_path), name, form).compile()


@pytest.mark.parametrize(("case", "form"), [*((case, "native-fp16") for case in CASES), ("FP8", "plugin")])
def test_quantized_target(case: str, form: str, tmp_path: Path) -> None:
    algorithm, options = CASES[case]
    path = make_target(tmp_path / "t", **{**DIMS, "num_layers": 1})
    check_target(tmp_path, load_checkpoint(quantize(path, algorithm, **options)), FORMS[form])


@pytest.mark.parametrize(("name", "form"), [(n, form) for n, (_, forms) in DRAFTERS.items() for form in forms])
def test_dflash_drafter(name: str, form: str, tmp_path: Path) -> None:
    """Attentions are fused under their masks, and outputs have the width of the drafter's head. In fp16 engines tapped
    states and embeddings come in the target's type, and caches are of the drafter's, bf16."""
    target = target_of(tmp_path, tied=form != "native-fp16-one-slot")
    drafter, types = drafter_of(tmp_path, **DRAFTERS[name][0]), rtx().DataType
    inputs, outputs = ends(Lowered(tmp_path, target, drafter, "drafter", FORMS[form]).compile())
    dims: Any = drafter.dims
    assert tuple(inputs[names.HEAD].shape) == (dims.head_size, dims.hidden_size)
    assert inputs[names.TAPS].dtype == inputs[names.EMBEDDING].dtype == (types.HALF if "fp16" in form else types.BF16)
    assert inputs["past_key.0"].dtype == types.BF16
    assert outputs[names.CANDIDATES].dtype == types.INT32
    assert tuple(outputs[names.CANDIDATES].shape)[1] == dims.draft_length
    assert ({names.UNARY, names.LEFT, names.RIGHT} <= set(outputs)) == (dims.pair_head is not None)


@pytest.mark.parametrize("form", ["plugin", "native-fp16-one-slot"])
def test_autoregressive_drafter(form: str, tmp_path: Path) -> None:
    target = target_of(tmp_path)
    drafter = load_checkpoint(make_target(tmp_path / "a", tied="fp16" not in form, tokenizer=False, **DIMS))
    Lowered(tmp_path, target, drafter, "drafter", FORMS[form]).compile()


def native(folder: Path, name: str = "target", **form: Any) -> Lowered:
    return Lowered(folder, target_of(folder), drafter_of(folder), name, Form(**form))


def test_an_attention_that_is_missing_is_named(tmp_path: Path) -> None:
    target = native(tmp_path)
    with pytest.raises(BuildError, match=r"no attention layer of the target's node 'another\.attn'"):
        mend_attentions(rtx(), target.parse(), "target", ["another.attn"])
    with pytest.raises(BuildError, match=r"its graph does not have: 'model\.layers\.0\.attn\.by_head'"):
        mend_attentions(rtx(), target.parse(), "target", [])


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_logits_are_float32_from_the_head_to_the_choice(name: str, tmp_path: Path) -> None:
    """The product, ArgMax and TopK in the parsed network, whose types the builder has to keep."""
    trt, parsed = rtx(), native(tmp_path, name).parse()
    layers = [parsed.get_layer(i) for i in range(parsed.num_layers)]
    (product,) = (
        layer
        for layer in layers
        if layer.type == trt.LayerType.MATRIX_MULTIPLY and layer.get_input(1).name == names.HEAD
    )
    (best,) = (layer for layer in layers if layer.type == trt.LayerType.TOPK)
    for tensor in (product.get_input(0), product.get_input(1), product.get_output(0), best.get_input(0)):
        assert tensor.dtype == trt.DataType.FLOAT, tensor.name
