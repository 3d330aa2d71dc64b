"""Automatic budgets on the packaged pair: what is expected of a round happens, and poor requests harm no other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from profiles import CPU, make_profile

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


def test_short_answers_half_of_them_poor_keep_their_drafts(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "load_or_measure", lambda *_: CPU)
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:24]]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    poor = np.random.default_rng(0).integers(0, 2048, (24, 20)).tolist()

    def per_round(mixed: bool) -> float:
        committed: list[int] = []
        with LLM(tiny_engine) as llm:
            for seed, (chat, random) in enumerate(zip(chats, poor, strict=True)):
                (output,) = llm.generate([chat], SamplingParams(max_tokens=24))
                committed += output.metrics.acceptance_lengths
                if mixed:
                    llm.generate([random], SamplingParams(max_tokens=24, temperature=2.0, seed=seed, ignore_eos=True))
        return sum(committed) / len(committed)

    assert per_round(mixed=True) >= 0.95 * per_round(mixed=False) > 4.5
