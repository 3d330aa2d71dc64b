"""The drafter's block on attention kernels that are always causal: written twice, it says the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_pair, make_target
from drafts import marginals
from engine_builds import CAUSAL, INSTALLED, PACKAGED, build_engine

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.toolchain import always_causal
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

needs_both = pytest.mark.skipif(always_causal({"onnxruntime": INSTALLED}), reason="the kernel here is always causal")


def refuse_to_draw(*_: object) -> DrawnFrom:
    raise AssertionError("a block drafter draws nothing")


def draft(engine: OrtEngine, bonus: int) -> Draft:
    return engine.draft([DraftRequest(0, bonus, 16, 1, refuse_to_draw)])[0]


@pytest.mark.parametrize(
    ("version", "causal"),
    [("1.23.2", True), ("1.29.1", True), ("1.30.0", False), ("1.30.0.dev20260101", False), ("2.0.0", False)],
)
def test_versions(version: str, causal: bool) -> None:
    assert always_causal({"onnxruntime": version, "python": "3.12.1"}) is causal


def test_an_unknown_version_is_taken_for_an_old_one() -> None:
    assert always_causal({"numpy": "2.2.0"})


@needs_both
def test_both_ways_draft_the_same(tmp_path: Path) -> None:
    """First passes of one row and of several pieces, then uneven rounds: everything the cache can look like."""
    pair = PACKAGED / "target", PACKAGED / "drafter"
    engines = [build_engine(*pair, tmp_path / v, onnxruntime=v, max_batch=1) for v in (INSTALLED, CAUSAL)]
    rng = np.random.default_rng(5)
    for first in (1, 40, 600):
        for engine in engines:
            engine.truncate(0, 0)
        for rows in (first, 3, 1, engines[0].manifest.drafting.dims.block_size):
            tokens = rng.integers(0, engines[0].manifest.target_dims.vocab_size, rows)
            for engine in engines:
                engine.prefill(0, tokens, rows="none", taps=True)
            once, twice = (marginals(draft(engine, bonus=int(tokens[0]))) for engine in engines)
            np.testing.assert_allclose(twice.log_probs, once.log_probs, rtol=1e-5, atol=1e-5)
            steps = -np.diff(once.log_probs, prepend=np.inf, append=-np.inf)
            clear = np.minimum(steps[:, 1:], steps[:, :-1]) > 1e-4  # no tie with a neighbour
            assert clear.mean() > 0.9
            np.testing.assert_array_equal(twice.token_ids[clear], once.token_ids[clear])


def test_generation_is_lossless(tmp_path: Path) -> None:
    build_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "engine", onnxruntime=CAUSAL).close()
    rows = [json.loads(line) for line in (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows[::12]]
    with LLM(tmp_path / "engine") as llm:
        results = {
            method: llm.generate(prompts, SamplingParams(method=method, tree_budget=budget, max_tokens=40))
            for method, budget in (("ar", 0), ("dflash", 5), ("ddtree", 12))
        }
    tokens = {method: [output.outputs[0].token_ids for output in outputs] for method, outputs in results.items()}
    assert tokens["ar"] == tokens["dflash"] == tokens["ddtree"]
    rounds = {method: sum(output.metrics.rounds for output in outputs) for method, outputs in results.items()}
    assert max(rounds["dflash"], rounds["ddtree"]) < 0.5 * rounds["ar"]


@pytest.mark.parametrize("version", sorted({INSTALLED, CAUSAL}))
def test_the_cache_is_never_overrun(tmp_path: Path, version: str) -> None:
    """A pass that would write behind the cache's last row is refused, to the row."""
    engine = build_engine(*make_pair(tmp_path), tmp_path / "engine", onnxruntime=version, max_batch=1)
    manifest = engine.manifest
    written = manifest.drafting.dims.block_size * (2 if always_causal(manifest.toolchain) else 1)
    for rows, fits in ((manifest.limits.cache_rows - written, True), (manifest.limits.cache_rows - written + 1, False)):
        engine.truncate(0, 0)
        engine.prefill(0, np.zeros(rows, np.int64), rows="none", taps=True)
        if fits:
            assert np.isfinite(marginals(draft(engine, bonus=1)).log_probs).all()
        else:
            with pytest.raises(EngineError, match="do not fit"):
                draft(engine, bonus=1)


@needs_both
def test_an_engine_for_a_newer_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_pair(tmp_path)
    make_target(tmp_path / "model", tokenizer=False)
    for name, network, version in (
        ("newer", drafter, INSTALLED),
        ("older", drafter, CAUSAL),
        ("autoregressive", tmp_path / "model", INSTALLED),
    ):
        build_engine(target, network, tmp_path / name, onnxruntime=version, max_batch=1).close()
    monkeypatch.setattr("ddtree_trt.runtime.engines.load.installed_versions", lambda *_: {"onnxruntime": CAUSAL})
    newer = tmp_path / "newer"
    with pytest.raises(ArtifactError) as refusal:
        open_engine(newer)
    assert f"built for the attention kernel of onnxruntime {INSTALLED}, found the older {CAUSAL}" in str(refusal.value)
    assert str(refusal.value).endswith(
        f"--max-batch 1 --backend onnxruntime --precision fp32 --output {newer} --force"
    ), refusal.value
    for name in ("older", "autoregressive"):
        open_engine(tmp_path / name).close()
    assert load_manifest(newer).toolchain["onnxruntime"] == INSTALLED
