"""Ablation of an EAGLE-3 engine, whose drafts depend on the tree that is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import in_this_process

from ddtree_trt.bench.ablation.recording import RecordedText
from ddtree_trt.bench.prompts import load_prompts
from ddtree_trt.bench.session import Session
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.kind import LEVELS
from ddtree_trt.runtime.decoding.policies import POLICIES
from ddtree_trt.runtime.params import SamplingParams

TOKENS = 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ablation") / "engine"
    compile_engine(BuildRequest(target="tiny-eagle3", output=path))
    return path


@pytest.fixture(scope="module")
def session(engine: Path) -> Iterator[Session]:
    with closing(Session(engine)) as session:
        yield session


def decode(session: Session, ids: list[int], **params: Any) -> Any:
    return session.generate(ids, SamplingParams(max_tokens=TOKENS, temperature=0.0, **params))[0]


@pytest.fixture(scope="module")
def texts(session: Session) -> list[RecordedText]:
    prompts = [session.codec.encode(p.opening) for p in load_prompts(("tiny",), 3)]
    return [RecordedText((*ids, *decode(session, ids, method="ar").outputs[0].token_ids), len(ids)) for ids in prompts]


def test_the_command_answers_for_a_drafter_by_levels(
    engine: Path, tmp_path: Path, no_measuring: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_this_process(capsys)(
        *("ablate", engine, "--limit", 2, "--max-tokens", 24, "--budgets", "8,300", "--depths", "2"),
        *("--temperatures", "0", "--timed-prompts", 1, "--json", tmp_path / "found"),
    )
    assert (code, err) == (0, ""), err
    assert "each tree has drafts of its own" in " ".join(out.split())
    found = json.loads((tmp_path / "found").read_text())
    assert {(row["policy"], row["nodes"]) for row in found["policies"]} == {
        (policy, nodes) for policy in POLICIES for nodes in (8, 300)
    }
    assert {row["depth"] for row in found["depths"]} == {2, 16} and found["draft_length"] == LEVELS
    assert [row["case"] for row in found["budgets"]] == ["ar", "eagle@8", "eagle@300"]
    decoded = {row["case"]: row["tau"] for row in found["budgets"]}
    assert found["conditionals"] == [] and len(found["builds"]) == 2 and decoded["eagle@300"] > 1
