"""Losslessness of the packaged drafters beside DFlash: DSpark's pair head, and EAGLE-3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddtree_trt
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.commands.build import measure
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams

PROMPTS = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "prompts.jsonl"
TOKENS = 48
METHODS = {"tiny-dspark": "ddtree", "tiny-eagle3": "eagle"}  # of each preset the one that makes trees


@pytest.fixture(scope="module", params=METHODS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An exact engine: every method has the tokens of ar, also where two are about equally probable."""
    path = tmp_path_factory.mktemp("drafters") / request.param
    compile_engine(BuildRequest(target=request.param, output=path, max_seq_len=320, max_batch=3))
    measure(path, lambda stage, done, total: None)
    with LLM(path, exact=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def chats() -> list[Any]:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [[{"role": "user", "content": row["prompt"]}] for row in rows[:: len(rows) // 4][:4]]


def decoded(llm: LLM, chats: list[Any], **params: Any) -> list[RequestOutput]:
    return llm.generate(chats, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **params))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(llm: LLM, chats: list[Any]) -> list[list[int]]:
    return tokens(decoded(llm, chats, method="ar"))


@pytest.mark.parametrize("budget", [1, 4, 16, 64, "auto"])
def test_greedy_output_is_that_of_ar(llm: LLM, chats: list[Any], plain: list[list[int]], budget: Any) -> None:
    outputs = decoded(llm, chats, method=METHODS[llm.engine.manifest.name], tree_budget=budget)
    assert tokens(outputs) == plain
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    if budget != "auto":  # by its costs, auto may well not draft
        assert accepted > 0.3 * TOKENS * len(chats), "the drafter should be of use here"
