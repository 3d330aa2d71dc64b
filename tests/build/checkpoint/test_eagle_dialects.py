"""EAGLE-3 checkpoints in the layouts they are published in: read into one record, or refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import eagle_weights, make_eagle, refusal, write_weights

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.build.checkpoint.reader import Checkpoint, load_checkpoint
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.families import QWEN3

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
        ("specforge-eagle3-qwen3-32b", {"attention_bias": True}, "attention_bias"),
        ("specforge-eagle3-qwen3-32b", {"num_hidden_layers": 2}, "num_layers"),
        ("specforge-eagle3-qwen3-32b", {"draft_vocab_size": 200000}, "draft_vocab_size"),
        ("specforge-eagle3-qwen3-32b", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("specforge-eagle3-qwen3-32b", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
         "use_sliding_window"),
        ("deepspec-eagle3-qwen3-8b", {"target_layer_ids": [9, 1]}, "tap_layers"),
        ("deepspec-eagle3-qwen3-8b", {"target_layer_ids": None}, "target_layer_ids"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError, match=field):
        read(tmp_path, name, **changes)


def test_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint, dims = loaded(make_eagle(tmp_path / "drafter", seed=3))
    assert not dims.own_embedding
    weights = eagle_weights(dims, 3)
    for name in ("layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "fc.weight", "d2t"):
        np.testing.assert_array_equal(checkpoint.tensor(name), weights[name])


def test_tables_of_its_own(tmp_path: Path) -> None:
    """The embedding it has is used, and the target's head where it has none, as SGLang does. One over fewer tokens than
    the target's cannot be the target's."""
    assert loaded(make_eagle(tmp_path / "drafter", own_embedding=True))[1].own_embedding
    assert not loaded(make_eagle(tmp_path / "drafter", own_head=False, draft_vocab_size=None))[1].own_head
    weights = eagle_weights(loaded(path := make_eagle(tmp_path / "smaller"))[1], 1)
    del weights["lm_head.weight"]
    write_weights(path, weights, dtype="fp32", shards=1)
    assert "lm_head.weight" in refusal(path)


def test_unused_tensors_are_passed_over(tmp_path: Path) -> None:
    path = make_eagle(tmp_path / "drafter")
    weights = {**eagle_weights(loaded(path)[1], 1), "t2d": np.zeros(96, np.int64)}
    write_weights(path, weights, dtype="fp32", shards=1)
    load_checkpoint(path)
    write_weights(path, {**weights, "extra.weight": np.zeros(4, np.float32)}, dtype="fp32", shards=1)
    assert "extra.weight" in refusal(path)


def test_a_layer_of_qwen3s_family(tmp_path: Path) -> None:
    """Heads are normed, and there is no draft vocabulary: DeepSpec's layout."""
    shape: dict[str, Any] = {"family": QWEN3, "draft_vocab_size": None, "tap_layers": (0, 1, 2), "own_embedding": True}
    stated = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2], "num_target_layers": 3}
    path = make_eagle(tmp_path, names={"layers.0.": "layers.0."}, config={**stated, "eagle_config": None}, **shape)
    checkpoint = load_checkpoint(path)
    assert checkpoint.dims.qk_norm and checkpoint.kind.tap_layers == (0, 1, 2)
