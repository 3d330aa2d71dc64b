"""Automatic budgets on the packaged pair: what is expected of a round happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from profiles import make_profile

import ddtree_trt
from ddtree_trt.runtime import core
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

PROMPTS = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "prompts.jsonl"
LEARNT = 200  # rounds


def test_expected_and_observed_tokens_agree(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are given, not measured, so that every run chooses the same budgets."""
    monkeypatch.setattr(core, "load_or_measure", lambda *_: make_profile(draft_s=1.0, slope=0.1))
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    rounds: list[Round] = []
    with LLM(tiny_engine) as llm:
        for seed, row in enumerate(rows[i] for offset in range(20) for i in range(offset, len(rows), 20)):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=256)
            for _ in llm.stream([{"role": "user", "content": row["prompt"]}], params, on_round=rounds.append):
                pass
    later = [(r.decision.expected_tokens, len(r.path)) for r in rounds[LEARNT:] if r.decision]
    assert len(later) > 300
    assert len({len(r.tree) for r in rounds}) > 5, "the rule should choose many sizes"
    expected, observed = (sum(column) for column in zip(*later, strict=True))
    assert expected == pytest.approx(observed, rel=0.05)
