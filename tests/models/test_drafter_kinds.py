"""What depends on the kind of drafter: its record, and the halves of its package."""

import json
from dataclasses import replace

import pytest

from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.dflash.heads import Convolution, Selector
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims, default_tap_layers
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import ArtifactError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.reading import Source, read_record

_SHAPE = (512, 64, 6, 4, 2, 64, 128, 1e-6, 1e4, 2048)
TARGET = TransformerDims(*_SHAPE)
DFLASH = DFlashDims(*_SHAPE, block_size=8, mask_token_id=511, tap_layers=(1, 3), num_target_layers=6)
EAGLE = replace(Eagle3Dims(*_SHAPE, tap_layers=(1, 2, 4), draft_vocab_size=100), num_layers=1)
LENT_HEAD = replace(EAGLE, own_head=False, draft_vocab_size=None)  # the target's
EACH = {"autoregressive": TARGET, "dflash": DFLASH, "eagle3": EAGLE}


@pytest.mark.parametrize(
    "dims",
    [
        replace(DFLASH, windows=(0, 4, 0, 0, 0, 7), anchor_first=True, selector=Selector(16, 32)),
        replace(DFLASH, draft_vocab_size=100, own_head=True, causal=(True,) * 6, convolution=Convolution(3, 4)),
        replace(EAGLE, target_hidden_size=32, own_embedding=True, norm_before_residual=True, norm_output=True),
        LENT_HEAD,
    ],
)
def test_a_manifest_holds_every_feature(dims: TransformerDims) -> None:
    source = Source("manifest.json", ArtifactError, "rebuild")
    assert read_record(type(dims), json.loads(json.dumps(dims.stated())), source) == dims


def test_the_layers_an_eagle3_drafter_taps() -> None:
    """An early, a middle and a late one of the target's, counted by the layer whose output is read."""
    assert default_tap_layers(32) == (1, 15, 28) and default_tap_layers(94) == (1, 46, 90)
    unnamed = kind_of(replace(EAGLE, tap_layers=()))
    assert unnamed.fitted(replace(TARGET, num_layers=8)) == replace(EAGLE, tap_layers=(1, 3, 4))
    assert unnamed.fitted(TARGET) == unnamed.dims
    assert all(kind_of(dims).fitted(TARGET) == dims for dims in EACH.values())


_LARGE = "draft_vocab_size 513 is more than vocab_size 512"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (replace(DFLASH, windows=(4, 4)), "windows has 2 entries for 6 layers"),
        (replace(DFLASH, draft_vocab_size=513, own_head=True), _LARGE),
        (replace(EAGLE, num_layers=2), "num_layers is 2, an EAGLE-3 drafter has 1"),
        (replace(EAGLE, tap_layers=(1, 3, 3)), "tap_layers [1, 3, 3] do not rise"),
        (replace(EAGLE, draft_vocab_size=513), _LARGE),
        (replace(EAGLE, own_head=False), "draft_vocab_size is 100, but the head is the target's"),
        *((dims, None) for dims in (*EACH.values(), LENT_HEAD)),
    ],
)
def test_contradictions(dims: TransformerDims, message: str | None) -> None:
    assert kind_of(dims).contradiction() == message


_WIDE = replace(EAGLE, hidden_size=96)
_LENT = replace(_WIDE, target_hidden_size=64)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        *((dims, None) for dims in EACH.values()),
        (replace(TARGET, hidden_size=32, num_layers=1), None),
        (replace(TARGET, vocab_size=500), "vocab_size is 500, the target's 512"),
        (replace(DFLASH, hidden_size=96), "hidden_size is 96, the target's 64"),
        (replace(DFLASH, num_target_layers=7), "num_target_layers is 7, the target's layers 6"),
        (replace(DFLASH, tap_layers=(6,)), "target_layer_ids [6] are not layers of the target, which has 6"),
        (_WIDE, "hidden_size is 96, the target's 64"),
        (_LENT, "hidden_size is 96, that of the target's embedding, which it uses, 64"),
        (replace(_LENT, own_embedding=True), None),
        (replace(_LENT, target_hidden_size=32), "target_hidden_size is 32, the target's 64"),
        (
            replace(LENT_HEAD, hidden_size=48, own_embedding=True, target_hidden_size=64),
            "hidden_size is 48, that of the target's head, which it uses, 64",
        ),
        (replace(EAGLE, tap_layers=()), "it names no target layers to tap, and a target of 6 layers has no usual ones"),
    ],
)
def test_what_does_not_fit_a_target(dims: TransformerDims, message: str | None) -> None:
    assert kind_of(dims).misfit(TARGET) == message
