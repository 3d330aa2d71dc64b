"""Small checkpoints in every dialect of drafters: what is read from them, and what is refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, drafter_weights, make_eagle, refusal, write_safetensors, write_weights

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.families import QWEN3

# One small DFlash-like drafter, written as each family of publishers would write it.

VOCABULARY = 32  # V' of the drafter with a smaller one
_TAPS = [0, 2]
_DECODER: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"] * 2,
}
SHAPE: dict[str, Any] = {**_DECODER, "block_size": 6, "mask_token_id": 95}
_OUTER = {"block_size": 6, "num_target_layers": 3}
_SECTION = {"mask_token_id": 95, "target_layer_ids": _TAPS}


def _speculators(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}DraftModel"],
        "speculators_model_type": kind.lower(),
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind.lower(),
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "a target"},
        },
        "aux_hidden_state_layer_ids": [tap + 1 for tap in _TAPS],
        "block_size": 6,
        "mask_token_id": 95,
        "draft_vocab_size": 96,
        "transformer_layer_config": _DECODER,
        **fields,
    }


DIALECTS: Mapping[str, dict[str, Any]] = {
    "zlab": {**_DECODER, **_OUTER, "architectures": ["DFlashDraftModel"], "dflash_config": _SECTION},
    "jetspec": {
        **_DECODER,
        **_OUTER,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {**_SECTION, "causal_head": True},
    },
    "deepspec": {
        **_DECODER,
        **_OUTER,
        **_SECTION,
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 0,
        "enable_confidence_head": False,
        "num_anchors": 512,
    },
    "specforge": {
        **_DECODER,
        **_OUTER,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {**_SECTION, "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 0},
    },
    "speculators-dflash": _speculators("DFlash"),
    "speculators-dspark": _speculators(
        "DSpark", sample_from_anchor=True, draft_vocab_size=VOCABULARY, markov_rank=0, markov_head_type="vanilla"
    ),
}
_WITH_TABLES = ("deepspec", "speculators-dflash", "speculators-dspark")


def weights_of(name: str) -> dict[str, np.ndarray]:
    """Random tensors under the names of the dialect, with every tensor that some of them have beside those in use."""
    own = OWN if name in _WITH_TABLES else {}
    smaller = {"draft_vocab_size": VOCABULARY} if name == "speculators-dspark" else {}
    shape = {**vars(TARGET_DIMS), "num_layers": 2, "block_size": 6, "mask_token_id": 95, "tap_layers": tuple(_TAPS)}
    fields: dict[str, Any] = {**shape, "num_target_layers": 3, **own, **smaller}
    weights = drafter_weights(DFlashDims(**fields), seed=7)
    return {**weights, "t2d": np.zeros(96, np.float32)} if smaller else weights


def make_dialect(
    path: Path,
    name: str,
    changes: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the drafter and return its directory. `changes` are entries of config.json that differ, where None removes
    one, `sections` those of objects within it."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(DIALECTS[name]))
    for section, entries in (sections or {}).items():
        config[section] |= entries
    merged = {**config, **(changes or {})}
    (path / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}, indent=1))
    write_safetensors(path / "model.safetensors", weights or weights_of(name), "fp32")
    return path


BLOCK = SHAPE["block_size"]


def dims_of(path: Path) -> DFlashDims:
    dims = load_checkpoint(path).dims
    assert isinstance(dims, DFlashDims)
    return dims


@pytest.mark.parametrize("name", DIALECTS)
def test_tensors_that_are_missing_surplus_or_of_another_shape(tmp_path: Path, name: str) -> None:
    def broken(change: Callable[[dict[str, np.ndarray]], object]) -> str:
        weights = weights_of(name)
        change(weights)
        return refusal(make_dialect(tmp_path, name, weights=weights))

    assert "lacks fc.weight, which its config.json calls for" in broken(lambda w: w.pop("fc.weight"))
    assert "fc.weight has shape [64, 32]" in broken(lambda w: w.update({"fc.weight": w["fc.weight"].T.copy()}))
    unknown = {"mask_hidden": np.zeros(32, np.float32)}
    assert "holds mask_hidden, which its config.json has no place for" in broken(lambda w: w.update(unknown))


@pytest.mark.parametrize("name", DIALECTS)
def test_an_unknown_field_is_refused_by_name_in_every_object(tmp_path: Path, name: str) -> None:
    config = make_dialect(tmp_path, name) / "config.json"
    stated = json.loads(config.read_text())
    for section in (None, *(key for key, value in stated.items() if isinstance(value, dict) and "rope" not in key)):
        changed = json.loads(json.dumps(stated))
        (changed if section is None else changed[section])["colour"] = 1
        config.write_text(json.dumps(changed))
        place = "colour" if section is None else f"{section}.colour"
        assert f"{place} is 1, which is not implemented" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["zlab", "jetspec", "specforge"])
@pytest.mark.parametrize(
    ("field", "other"), [("block_size", 8), ("mask_token_id", 5), ("target_layer_ids", [1]), ("num_target_layers", 9)]
)
def test_a_value_may_stand_in_either_place(tmp_path: Path, name: str, field: str, other: Any) -> None:
    config = make_dialect(tmp_path, name) / "config.json"
    expected, stated = dims_of(tmp_path), json.loads(config.read_text())
    value = stated.pop(field, None) or stated["dflash_config"].pop(field)
    moved = {**stated, "dflash_config": {k: v for k, v in stated["dflash_config"].items() if k != field}}
    for places in (("outer",), ("inner",), ("outer", "inner")):
        changed = json.loads(json.dumps(moved))
        if "outer" in places:
            changed[field] = value
        if "inner" in places:
            changed["dflash_config"][field] = value
        config.write_text(json.dumps(changed))
        assert dims_of(tmp_path) == expected
    changed[field] = other
    config.write_text(json.dumps(changed))
    if field in ("block_size", "num_target_layers"):
        found = f"{field} is {json.dumps(other)}, but {json.dumps(value)} in dflash_config: which is it?"
    else:
        found = f"dflash_config.{field} is {json.dumps(value)}, but {json.dumps(other)} in the file: which is it?"
    assert found in refusal(tmp_path)


# Values: entries of config.json, those of objects within it, and the fields of the dimensions they make

BOTH, FIRST = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]
SWITCHED = {"sliding_window": 8, "use_sliding_window": True}
STATED: list[tuple[Any, Any, tuple[bool, ...]]] = [
    ({"is_causal": True}, {}, (True, True)),
    ({}, {"causal": True}, (True, True)),
    ({}, {"causal_head": True}, (True, True)),
    ({"is_causal": False}, {"causal": False, "causal_head": False}, ()),
]


OWN = {"own_embedding": True, "own_head": True}
SLIDING = {"layer_types": FIRST, **SWITCHED}
SLID = {"windows": (8, 0), "causal": (True, False)}
SPECULATORS = {**OWN, "num_target_layers": None}
# What a dialect's drafter is, stated here a second time, so that the truth does not depend on the reader.
BASES: dict[str, dict[str, Any]] = {
    "zlab": {},
    "jetspec": {"causal": (True, True)},
    "deepspec": {**OWN, "anchor_first": True},
    "specforge": {"anchor_first": True},
    "speculators-dflash": SPECULATORS,
    "speculators-dspark": {**SPECULATORS, "anchor_first": True, "draft_vocab_size": VOCABULARY},
}


def proposing(tokens: int) -> dict[str, Any]:
    methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    return {"speculators_config": {"proposal_methods": methods}}


@pytest.mark.parametrize(
    ("name", "changes", "sections", "expected"),
    [
        *((name, {}, {}, {}) for name in BASES),
        ("zlab", {}, {"dflash_config": {"sample_from_anchor": True}}, {"anchor_first": True}),
        ("speculators-dflash", {}, {"transformer_layer_config": SLIDING}, SLID),
        # What is stated for the block counts, in vLLM's order; otherwise the layers that slide are causal.
        *(
            ("zlab", {**outer, **window}, {"dflash_config": inner}, {"windows": windows, "causal": causal})
            for outer, inner, causal in STATED
            for window, windows in (({}, ()), (SLIDING, (8, 0)))
        ),
        # `use_swa`: all layers slide where none is listed, and none of them is causal for that.
        ("zlab", {"layer_types": None}, {"dflash_config": {"use_swa": True, "swa_window_size": 6}},
         {"windows": (6, 6)}),
        ("deepspec", {"layer_types": BOTH, "sliding_window": 8}, {}, {"windows": (8, 8), "causal": (True, True)}),
        ("speculators-dflash", {"sliding_window_non_causal": True}, {"transformer_layer_config": SLIDING},
         {"windows": (8, 0)}),
        # layer ids of speculators are one more than the taps
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [3, 1]}, {}, {"tap_layers": (2, 0)}),
        # whether position 0 predicts
        *(
            ("speculators-dflash", {"sample_from_anchor": stated}, proposing(BLOCK - fewer), {"anchor_first": first})
            for stated, fewer, first in (
                (None, 1, False), (None, 0, True), (False, 2, False), (True, 1, True), (True, 0, True)
            )
        ),
    ],
)  # fmt: skip
def test_what_values_mean(
    tmp_path: Path, name: str, changes: dict[str, Any], sections: dict[str, Any], expected: dict[str, Any]
) -> None:
    shape = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": 95, "tap_layers": (0, 2), "num_target_layers": 3}
    meant = {**vars(TARGET_DIMS), **shape, **BASES[name], **expected}
    assert dims_of(make_dialect(tmp_path, name, changes, sections)) == DFlashDims(**meant)


@pytest.mark.parametrize(
    ("name", "changes", "sections", "message"),
    [
        ("zlab", {"is_causal": True}, {"dflash_config": {"causal": False}},
         "is_causal is true and dflash_config.causal is false: which is it?"),
        ("zlab", {"layer_types": None, "sliding_window": 7}, {"dflash_config": {"use_swa": True, "swa_window_size": 6}},
         "sliding_window is 7, but swa_window_size is 6: which is it?"),
        ("zlab", {**SWITCHED, "layer_types": BOTH, "sliding_window": None}, {},
         "sliding_window is missing, but layers have 'sliding_attention'"),
        ("zlab", {**SWITCHED, "layer_types": BOTH, "use_sliding_window": False}, {},
         "layer_types has 'sliding_attention', but use_sliding_window is false"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [0, 2]}, {},
         "aux_hidden_state_layer_ids[0] must be an integer from 1 to 1000, found 0"),
        ("speculators-dflash", {"sliding_window": 9}, {"transformer_layer_config": SLIDING},
         "sliding_window is 8, but 9 in the file: which is it?"),
        ("speculators-dflash", {"sample_from_anchor": False}, proposing(BLOCK),
         f"proposes {BLOCK} tokens, more than block_size {BLOCK} and sample_from_anchor false"),
        ("speculators-dspark", {"target_hidden_size": 64}, {},
         "target_hidden_size is 64, which is not implemented; only 32 is"),
        ("speculators-dspark", {"markov_head_type": "rnn"}, {},
         "markov_head_type must be 'vanilla' or 'gated', found 'rnn'"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(
    tmp_path: Path, name: str, changes: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    assert message in refusal(make_dialect(tmp_path, name, changes, sections))


def test_offsets_that_are_no_vocabulary(tmp_path: Path) -> None:
    for offsets, message in (
        (np.full(VOCABULARY, 96), "d2t, added to its indices, reaches from 96 to"),
        (-np.arange(VOCABULARY), "d2t, added to its indices, stands for one token by two ids"),
        (np.zeros(VOCABULARY, np.float32), "d2t is stored as F32; supported are I64, I32"),
    ):
        weights = {**weights_of("speculators-dspark"), "d2t": offsets}
        path = make_dialect(tmp_path, "speculators-dspark", weights=weights)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path).tensor("d2t")


@pytest.mark.parametrize("name", ["deepspec", "speculators-dflash"])
@pytest.mark.parametrize("held", [(), ("embed_tokens.weight",), ("embed_tokens.weight", "lm_head.weight")])
def test_tables_are_the_drafters_own_where_it_holds_them(tmp_path: Path, name: str, held: tuple[str, ...]) -> None:
    weights = {k: v for k, v in weights_of(name).items() if k in held or not k.startswith(("embed_", "lm_head"))}
    dims = dims_of(make_dialect(tmp_path, name, weights=weights))
    assert (dims.own_embedding, dims.own_head) == ("embed_tokens.weight" in held, "lm_head.weight" in held)


@pytest.mark.parametrize("held", [False, True])
def test_a_head_over_fewer_tokens_is_its_own_or_rows_of_the_targets(tmp_path: Path, held: bool) -> None:
    weights = {**weights_of("specforge"), "d2t": np.zeros(30, np.int64)}
    head = {"lm_head.weight": np.zeros((30, TARGET_DIMS.hidden_size), np.float32)} if held else {}
    path = make_dialect(tmp_path, "specforge", {"draft_vocab_size": 30}, weights={**weights, **head})
    assert dims_of(path).own_head is held and bool(load_checkpoint(path).kind.borrowed_rows) is not held


def test_a_mask_with_an_embedding_of_its_own(tmp_path: Path) -> None:
    (make_dialect(tmp_path, "zlab") / "mask_embedding.pt").write_bytes(b"")
    assert "has mask_embedding.pt" in refusal(tmp_path)


# EAGLE-3

FIXTURES = Path(__file__).parents[2] / "fixtures" / "eagle"


def read(folder: Path, name: str, **changes: Any) -> Eagle3Dims:
    """The dimensions of a published config.json with these entries changed."""
    config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    dims = read_config(folder).dims
    assert isinstance(dims, Eagle3Dims)
    return dims


def loaded(path: Path) -> tuple[Checkpoint, Eagle3Dims]:
    checkpoint = load_checkpoint(path)
    assert isinstance(checkpoint.dims, Eagle3Dims)
    return checkpoint, checkpoint.dims


def test_two_ways_to_count_taps(tmp_path: Path) -> None:
    """Within `eagle_config` they are layers whose output is read; beside it, as vLLM counts, those that read it."""
    name, field = "specforge-eagle3-qwen3-235b", "eagle_aux_hidden_state_layer_ids"
    assert read(tmp_path, name, eagle_config=None, **{field: [2, 47, 91]}).tap_layers == (1, 46, 90)
    assert read(tmp_path, "speculators-eagle3-mistral3-675b", **{field: [2, 18, 33]}).tap_layers == (1, 17, 32)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("speculators-eagle3-mistral3-675b", {"norm_before_fc": True}, "norm_before_fc"),
        ("speculators-eagle3-mistral3-675b", {"norm_before_residual": None}, "norm_before_residual"),
        ("specforge-eagle3-qwen3-32b", {"parallel_drafting": True}, "parallel_drafting"),
        ("specforge-eagle3-qwen3-32b", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("specforge-eagle3-qwen3-32b", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
         "use_sliding_window"),
        ("deepspec-eagle3-qwen3-8b", {"target_layer_ids": None}, "target_layer_ids"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        read(tmp_path, name, **changes)


def test_tables_of_its_own(tmp_path: Path) -> None:
    """The embedding it has is used, and the target's head where it has none, as SGLang does. One over fewer tokens than
    the target's cannot be the target's."""
    assert loaded(make_eagle(tmp_path / "drafter", own_embedding=True))[1].own_embedding
    assert not loaded(make_eagle(tmp_path / "drafter", own_head=False, draft_vocab_size=None))[1].own_head
    weights = drafter_weights(loaded(path := make_eagle(tmp_path / "smaller"))[1], 1)
    del weights["lm_head.weight"]
    write_weights(path, weights, dtype="fp32", shards=1)
    assert "lm_head.weight" in refusal(path)


def test_a_layer_of_qwen3s_family(tmp_path: Path) -> None:
    """Heads are normed, and there is no draft vocabulary: DeepSpec's layout."""
    shape: dict[str, Any] = {"family": QWEN3, "draft_vocab_size": None, "tap_layers": (0, 1, 2), "own_embedding": True}
    stated = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2], "num_target_layers": 3}
    path = make_eagle(tmp_path, names={"layers.0.": "layers.0."}, config={**stated, "eagle_config": None}, **shape)
    checkpoint, dims = loaded(path)
    assert dims.qk_norm and checkpoint.kind.tap_layers == (0, 1, 2)
    weights = {**drafter_weights(dims, 1), "t2d": np.zeros(96, np.int64)}  # which nothing uses
    write_weights(path, weights, dtype="fp32", shards=1)
    load_checkpoint(path)
