"""An engine with device rounds and one without, and prompts for both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_builds import PACKAGED, build_torch_engine
from torch_rounds import SLOTS, TOKENS

from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds") / "tiny"
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", path, max_batch=SLOTS, max_seq_len=320).close()
    return path


@pytest.fixture(scope="module")
def device(directory: Path) -> Iterator[LLM]:
    with LLM(directory, threads=1, device_rounds="on") as llm:
        yield llm


@pytest.fixture(scope="module")
def host(directory: Path) -> Iterator[LLM]:
    with LLM(directory, threads=1, device_rounds="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    """Of every domain, and at the end two whose answers are short."""
    rows = [json.loads(row) for row in (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    short = sorted(rows, key=lambda row: len(row["reference"]))[:2]
    return [[{"role": "user", "content": row["prompt"]}] for row in [*rows[::9], *short]]


@pytest.fixture(scope="module")
def plain(host: LLM, prompts: list[Any]) -> dict[bool, list[Any]]:
    """What the target says by itself; by whether it goes on past its end."""

    def alone(going: bool) -> list[Any]:
        return host.generate(prompts, SamplingParams(max_tokens=TOKENS, method="ar", ignore_eos=going))

    return {going: alone(going) for going in (False, True)}
