"""What depends on the kind of drafter: its record, and the tables that have a row for every kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, get_args

import pytest
from ddtree_trt.models.drafters.kinds import EMBEDDING, HEAD, LONGEST_CHAIN, DrafterKind, KindName, dims_record, kind_of
from ddtree_trt.models.pairs import misfit

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.device import buffers as sizes
from ddtree_trt.device.buffers import tensorrt_buffers
from ddtree_trt.device.memory import plan_engine
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.drafters.eagle3.dims import (
    Eagle3Dims,
    default_tap_layers,
    eagle3_contradiction,
    eagle3_shapes,
    fitted,
)
from ddtree_trt.errors import ArtifactError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.drafters import kinds
from ddtree_trt.reading import Source, read_record

_SHAPE = (512, 64, 6, 4, 2, 64, 128, 1e-6, 1e4, 2048)
TARGET = TransformerDims(*_SHAPE)
DFLASH = DFlashDims(*_SHAPE, block_size=8, mask_token_id=511, tap_layers=(1, 3), num_target_layers=6)
EAGLE = replace(Eagle3Dims(*_SHAPE, tap_layers=(1, 2, 4), draft_vocab_size=100), num_layers=1)
LIMITS = Limits(max_seq_len=256, max_batch=4, max_tree_budget=32, prefill_chunk=64)


def test_what_a_dflash_drafter_needs_and_offers() -> None:
    kind = kind_of(DFLASH)
    assert kind.name == "dflash" and not kind.language_model and not kind.own_tables
    assert (kind.tap_layers, kind.target_layers, kind.mask_token_id) == ((1, 3), 6, 511)
    assert kind.at_once and (kind.block_size, kind.longest_draft) == (8, 7)


def test_a_block_drafters_features() -> None:
    """Fields of later checkpoints: absent from a manifest where they are as in the first ones."""
    new = {"windows", "causal", "anchor_first", "draft_vocab_size", "own_embedding", "own_head", "markov_rank"}
    assert not (DFLASH.stated().keys() & {*new, "selector", "convolution"}) and DFLASH.features() == []
    dims = replace(DFLASH, windows=(0, 4, 0, 0, 0, 7), anchor_first=True, selector=Selector(16, 32))
    assert dims.features() == ["windows", "anchor_first", "selector"]
    assert (DFLASH.draft_length, dims.draft_length, kind_of(dims).longest_draft) == (7, 8, 8)
    assert [dims.sight(i) for i in (0, 1, 5)] == [Sight(), Sight(4), Sight(7)]
    source = Source("manifest.json", ArtifactError, "rebuild")
    assert read_record(DFlashDims, json.loads(json.dumps(dims.stated())), source) == dims
    whole = replace(dims, draft_vocab_size=100, own_head=True, causal=(True,) * 6, convolution=Convolution(3, 4))
    assert read_record(DFlashDims, json.loads(json.dumps(whole.stated())), source) == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": (4, 4)}, "windows has 2 entries for 6 layers"),
        ({"causal": (True,)}, "causal has 1 entries for 6 layers"),
        ({"draft_vocab_size": 513, "own_head": True}, "draft_vocab_size 513 is more than vocab_size 512"),
    ],
)
def test_features_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    assert dflash_contradiction(replace(DFLASH, **fields)) == message
    assert dflash_contradiction(DFLASH) is None


def test_what_an_autoregressive_drafter_needs_and_offers() -> None:
    kind = kind_of(TARGET)
    assert kind.name == "autoregressive" and kind.language_model
    assert [table.name for table in kind.own_tables] == [EMBEDDING, HEAD]
    assert (kind.tap_layers, kind.target_layers, kind.mask_token_id, kind.block_size) == ((), None, None, None)
    assert not kind.at_once and kind.longest_draft == LONGEST_CHAIN


def test_what_an_eagle3_drafter_needs_and_offers() -> None:
    kind = kind_of(EAGLE)
    assert kind.name == "eagle3" and not kind.language_model and [t.name for t in kind.own_tables] == [HEAD]
    assert (kind.tap_layers, kind.target_layers, kind.block_size) == ((1, 2, 4), None, None)
    assert kind.by_levels and kind.rows_read_next and not kind.at_once
    assert EAGLE.taps_width == 3 * 64 and replace(EAGLE, target_hidden_size=32).taps_width == 3 * 32
    source = Source("manifest.json", ArtifactError, "rebuild")
    whole = replace(EAGLE, target_hidden_size=32, own_embedding=True, norm_before_residual=True, norm_output=True)
    assert read_record(Eagle3Dims, json.loads(json.dumps(whole.stated())), source) == whole


def test_the_tensors_of_an_eagle3_drafter() -> None:
    shapes = eagle3_shapes(EAGLE)
    assert shapes["fc.weight"] == (64, 192) and shapes["lm_head.weight"] == (100, 64) and shapes["d2t"] == (100,)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4 * 64, 2 * 64)
    assert shapes["layers.0.self_attn.v_proj.weight"] == (2 * 64, 2 * 64)
    assert shapes["layers.0.hidden_norm.weight"] == shapes["layers.0.input_layernorm.weight"] == (64,)
    assert "embed_tokens.weight" not in shapes
    whole = eagle3_shapes(replace(EAGLE, own_embedding=True, draft_vocab_size=None))
    assert whole["embed_tokens.weight"] == whole["lm_head.weight"] == (512, 64) and "d2t" not in whole
    without = replace(EAGLE, own_head=False, draft_vocab_size=None)
    assert "lm_head.weight" not in eagle3_shapes(without) and not kind_of(without).own_tables


def test_an_eagle3_drafter_with_the_targets_head() -> None:
    """Its manifest says so, one with a head of its own is written as ever; a smaller vocabulary needs its own."""
    assert "own_head" not in EAGLE.stated()
    without = replace(EAGLE, own_head=False, draft_vocab_size=None)
    source = Source("manifest.json", ArtifactError, "rebuild")
    assert read_record(Eagle3Dims, json.loads(json.dumps(without.stated())), source) == without
    assert eagle3_contradiction(without) is None
    smaller = "draft_vocab_size is 100, but the head is the target's"
    assert eagle3_contradiction(replace(EAGLE, own_head=False)) == smaller
    narrow = replace(without, hidden_size=48, own_embedding=True, target_hidden_size=64)
    assert misfit(TARGET, narrow) == "hidden_size is 48, that of the target's head, which it uses, 64"


def test_the_layers_an_eagle3_drafter_taps() -> None:
    """An early, a middle and a late one of the target's, counted by the layer whose output is read."""
    assert default_tap_layers(32) == (1, 15, 28) and default_tap_layers(94) == (1, 46, 90)
    unnamed = replace(EAGLE, tap_layers=())
    assert fitted(unnamed, replace(TARGET, num_layers=8)) == replace(EAGLE, tap_layers=(1, 3, 4))
    problem = "it names no target layers to tap, and a target of 6 layers has no usual ones"
    assert misfit(TARGET, fitted(unnamed, TARGET)) == problem
    assert fitted(EAGLE, TARGET) == EAGLE and fitted(DFLASH, TARGET) == DFLASH


def test_what_an_eagle3_drafter_cannot_be() -> None:
    assert eagle3_contradiction(EAGLE) is None
    assert eagle3_contradiction(replace(EAGLE, num_layers=2)) == "num_layers is 2, an EAGLE-3 drafter has 1"
    assert eagle3_contradiction(replace(EAGLE, tap_layers=(1, 3, 3))) == "tap_layers [1, 3, 3] do not rise"
    expected = "draft_vocab_size 513 is more than vocab_size 512"
    assert eagle3_contradiction(replace(EAGLE, draft_vocab_size=513)) == expected


def test_an_eagle3_drafter_fits_by_its_targets_width() -> None:
    assert misfit(TARGET, EAGLE) is None
    wide = replace(EAGLE, hidden_size=96)
    assert misfit(TARGET, wide) == "hidden_size is 96, the target's 64"
    lent = replace(wide, target_hidden_size=64)
    assert misfit(TARGET, lent) == "hidden_size is 96, that of the target's embedding, which it uses, 64"
    assert misfit(TARGET, replace(lent, own_embedding=True)) is None
    assert misfit(TARGET, replace(lent, target_hidden_size=32)) == "target_hidden_size is 32, the target's 64"


def test_dimensions_tell_the_kind() -> None:
    of_kind = {DFlashDims: DFLASH, TransformerDims: TARGET, Eagle3Dims: EAGLE}
    for name in get_args(KindName):
        assert kind_of(of_kind[dims_record(name)]).name == name
    unknown: list[object] = ["medusa", None, []]
    assert all(dims_record(name) is TransformerDims for name in unknown)

    class Unknown(TransformerDims):
        pass

    with pytest.raises(TypeError, match="no kind of drafter has dimensions of type Unknown"):
        kind_of(Unknown(*_SHAPE))


@pytest.mark.parametrize(
    ("module", "table"),
    [
        ("ddtree_trt.artifact.weight_layout", "_DRAFTERS"),
        ("ddtree_trt.models.drafters.kinds", "_KINDS"),
        ("ddtree_trt.models.pairs", "_SHAPES"),
        ("ddtree_trt.build.graph.drafters", "_BUILDERS"),
        ("ddtree_trt.runtime.engines.onnxruntime.drafter", "_MAKERS"),
        ("ddtree_trt.runtime.engines.tensorrt.drafter", "_MAKERS"),
        ("ddtree_trt.drafters.dflash.on_torch", "_MAKERS"),
    ],
)
def test_every_table_has_a_row_for_every_kind(module: str, table: str) -> None:
    if ".torch." in module:
        pytest.importorskip("torch")
    rows: Mapping[str, object] = getattr(import_module(module), table)
    assert set(rows) == set(get_args(KindName))


def test_a_language_model_fits_by_its_vocabulary_alone() -> None:
    assert misfit(TARGET, replace(TARGET, hidden_size=32, num_layers=1)) is None
    assert misfit(TARGET, replace(TARGET, vocab_size=500)) == "vocab_size is 500, the target's 512"


@dataclass(frozen=True)
class TappedDims(TransformerDims):
    """A drafter that taps the target and drafts token by token, with the target's embedding and head."""

    taps: tuple[int, ...] = (1, 2, 4)


def _tapped(dims: TappedDims) -> DrafterKind:
    return DrafterKind("dflash", "tapped drafter", language_model=False, tap_layers=dims.taps)


def test_a_kind_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is laid out and refused for a new kind follows from what its record says it needs."""
    table: dict[str, object] = {"tapped": (TappedDims, _tapped), **dict(kinds._KINDS.items())}
    monkeypatch.setattr(kinds, "_KINDS", table)
    dims = TappedDims(*_SHAPE)
    buffers = tensorrt_buffers(TARGET, dims, LIMITS, 2)
    rows = sizes.pass_rows(LIMITS, LIMITS.max_batch)
    assert buffers[sizes.TAPS] == rows * 3 * 64 * 2  # its taps, as a DFlash drafter's
    assert buffers[sizes.DRAFT_LOGITS] == 512 * 4  # its logits, as a language model's
    assert sizes.DRAFTER_EMBEDDING not in buffers
    plan = plan_engine("tensorrt", "bf16", TARGET, dims, LIMITS, 0)
    assert plan.weights_bytes == 512 * 64 * 4  # one head, the target's
    assert misfit(TARGET, replace(dims, taps=(6,))) == "target_layer_ids [6] are not layers of the target, which has 6"
