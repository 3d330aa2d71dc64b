"""Configurations of published drafters: each is read right, or refused with the name of what is not supported.

A fixture has the configuration, and under `read` fields of the record, or under `refused` the message.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.errors import CheckpointError

FIXTURES = {
    path.stem: json.loads(path.read_text())
    for folder in ("drafters", "eagle")
    for path in (Path(__file__).parents[2] / "fixtures" / folder).glob("*.json")
}
# Those of the first published checkpoints have their defaults.
FEATURES = """windows causal anchor_first draft_vocab_size own_embedding own_head markov_rank selector convolution
logit_scale logit_cap""".split()


def read(path: Path, config: dict[str, Any]) -> DFlashDims | Eagle3Dims:
    (path / "config.json").write_text(json.dumps(config))
    dims = read_config(path).dims
    assert isinstance(dims, DFlashDims | Eagle3Dims)
    return dims


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_a_published_drafter_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    config, expected = FIXTURES[name]["config"], FIXTURES[name].get("read")
    if expected is None:
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path, config)
        assert FIXTURES[name]["refused"] in str(caught.value) and "\n" not in str(caught.value)
        return
    dims = read(tmp_path, config)
    found = json.dumps({field: getattr(dims, field) for field in expected}, default=dataclasses.asdict)
    assert json.loads(found) == expected
    assert isinstance(dims, Eagle3Dims) or set(dims.features()) == expected.keys() & {*FEATURES}


def test_the_kind_of_a_markov_head(tmp_path: Path) -> None:
    """Plain or gated, and a rank of 0 is no head; a recurrent one is refused."""
    config = FIXTURES["deepspec-dspark-qwen3-4b"]["config"]
    for kind, rank, gated in (("vanilla", 256, False), ("gated", 256, True), ("gated", 0, False)):
        dims = read(tmp_path, {**config, "markov_head_type": kind, "markov_rank": rank})
        assert isinstance(dims, DFlashDims) and (dims.markov_rank, dims.markov_gated) == (rank, gated)
    with pytest.raises(CheckpointError, match="markov_head_type"):
        read(tmp_path, {**config, "markov_head_type": "rnn"})
