"""Ablations: replays are the rounds of decoding, and trees are what their names say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_manifest

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.bench.prompts import load_prompts
from ddtree_trt.bench.session import Session
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.kind import EXPANDED, LEVELS
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.candidates import Bilinear, Marginals
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import DraftTree
from workbench.ablate import ablate, build_times, limits_for, main, text
from workbench.ablate.replay import KnownText, Questions, TreePlan, record, replay
from workbench.ablate.trees import BEAM, CHAIN, EAGLE2, HEAP, POLICIES, Policy, without_conditions


def random_draft(seed: int, length: int = 4, candidates: int = 5) -> Marginals:
    """A draft without ties."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(-np.log(rng.dirichlet(np.ones(candidates) / 2, length)), axis=1)
    tokens = np.stack([rng.permutation(100)[:candidates] for _ in range(length)])
    return Marginals(log_probs.astype(np.float32), tokens.astype(np.int32))


def random_bilinear(seed: int) -> Bilinear:
    rng = np.random.default_rng(seed)
    unary = -np.sort(-rng.normal(size=(3, 4)), axis=1)
    tokens = np.stack([rng.permutation(100)[:4] for _ in range(3)])
    left, right = rng.normal(size=(2, 3, 4, 2)).astype(np.float32)
    return Bilinear(unary.astype(np.float32), tokens.astype(np.int32), left, right)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tree's prefixes, as tokens from the root down."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert [len(path) for path in paths[1:]] == tree.depths.tolist()
    return paths[1:]


# Trees


@given(st.integers(0, 100), st.integers(1, 20))
def test_policies_follow_conditionals(seed: int, nodes: int) -> None:
    """With all candidates EAGLE-2's tree is that of the heap; the chain follows each best child; trees nest."""
    drafted = random_bilinear(seed)
    assert set(paths_of(EAGLE2.grow(drafted, nodes, 3, 64))) == set(paths_of(HEAP.grow(drafted, nodes, 3, None)))
    row, chain = 0, []
    for _ in range(3):
        _, tokens, rows = drafted.child_log_probs([row])
        row = int(rows[0, 0])
        chain.append(int(tokens[0, 0]))
    assert paths_of(CHAIN.grow(drafted, 3, 3, None))[-1] == tuple(chain)
    for policy in POLICIES:
        assert paths_of(policy.grow(drafted, nodes, 3, 2))[:3] == paths_of(policy.grow(drafted, min(nodes, 3), 3, 2))


@given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 30))
def test_a_beam_keeps_the_best_of_each_depth(seed: int, width: int, nodes: int) -> None:
    drafted = random_draft(seed)
    level, expected = [((), 0.0)], list[tuple[int, ...]]()
    for log_probs, tokens in zip(drafted.log_probs.tolist(), drafted.token_ids.tolist(), strict=True):
        pairs = list(zip(log_probs[:width], tokens[:width], strict=True))
        children = [((*path, token), weight + min(step, 0)) for path, weight in level for step, token in pairs]
        level = sorted(children, key=lambda child: -child[1])[:width]  # type: ignore[assignment]
        expected += [path for path, _ in level]
    assert paths_of(BEAM.grow(drafted, nodes, 4, width)) == expected[:nodes]


def test_impossible_candidates_are_left_out() -> None:
    """Of a drafter with fewer words than candidates were asked for."""
    drafted = random_draft(0)
    drafted.log_probs[:, 2:] = -np.inf
    for policy in (EAGLE2, BEAM):
        tree = policy.grow(drafted, 40, 4, 5)
        assert len(tree) <= 2 + 4 + 8 + 16 and np.isfinite(tree.log_weights).all()


def test_marginals_are_those_before_the_parent_is_known() -> None:
    drafted = random_bilinear(0)
    plain = without_conditions(drafted)
    assert plain is not None and without_conditions(plain) is None
    weights = np.exp(drafted.unary.astype(np.float64))
    np.testing.assert_allclose(np.exp(plain.log_probs), weights / weights.sum(1, keepdims=True), rtol=1e-5)


# Replays


def known(drafts: list[Any], tokens: tuple[int, ...]) -> list[KnownText]:
    return [KnownText((7, *tokens), 1, tuple(drafts))]


def test_a_replay_follows_the_text() -> None:
    drafted = Marginals(np.log(np.array([[0.6, 0.4], [0.5, 0.5]], np.float32)), np.array([[1, 2], [3, 4]], np.int32))
    # Behind 9: 2, 3, then 5 is the target's own; behind 5 nothing is right; behind 8 the text ends.
    found = replay(known([drafted] * 5, (9, 2, 3, 5, 8, 1)), TreePlan(HEAP, 6, 2))
    assert (found.lengths, found.histogram) == (((3, 1, 1),), {1: 2, 3: 1})
    assert found.tau == pytest.approx(5 / 3) and found.expected == pytest.approx(3)  # every prefix: 1 + 1 + 1


def test_more_nodes_or_depth_never_promise_less() -> None:
    questions = Questions(known([random_draft(i) for i in range(3)], (9, 2, 3, 5)), (2, 8, 30), (1, 2), 4, 4)
    rows = {(row.nodes, row.depth): row.expected for row in questions.by_depth()}
    assert set(rows) == {(n, d) for n in (2, 8, 30) for d in (1, 2, 4)}
    assert all(rows[n, 4] >= rows[n, 2] >= rows[n, 1] for n in (2, 8, 30))
    best = {(row.nodes, row.policy): row for row in questions.policies()}
    assert all(best[n, "heap"].expected >= best[n, p.name].expected - 1e-9 for n in (2, 8, 30) for p in POLICIES)
    assert best[8, "beam"].width in (1, 2, 4, 8) and best[8, "heap"].width is None
    assert questions.conditionals() == []
    both = replace(questions, texts=known([random_bilinear(i) for i in range(3)], (9, 2, 3, 5)), length=3)
    assert [row.candidates for row in both.conditionals()] == ["marginals"] * 3 + ["conditionals"] * 3


def decode(session: Session, ids: list[int], **params: Any) -> Any:
    return session.generate(ids, SamplingParams(max_tokens=40, temperature=0.0, **params))[0]


def texts_of(session: Session) -> list[tuple[list[int], int]]:
    prompts = [session.codec.encode(p.opening) for p in load_prompts(("tiny",), 3)]
    return [(ids + decode(session, ids, method="ar").outputs[0].token_ids, len(ids)) for ids in prompts]


def test_replays_are_the_rounds_of_decoding(tiny_engine: Path) -> None:
    """Round by round: the same lengths as the engine's own decoding with that tree, also to the last one."""
    with closing(Session(tiny_engine)) as session:
        texts = texts_of(session)
        recorded = record(session.engine, texts, 64)
        assert session.engine.length(0) == 0
        for plan, params in (
            (TreePlan(HEAP, 5, 15), {"tree_budget": 5}),
            (TreePlan(HEAP, 64, 15), {"tree_budget": 64}),
            (TreePlan(CHAIN, 15, 15), {"method": "dflash"}),
        ):
            outputs = [decode(session, ids[:start], **params) for ids, start in texts]
            assert replay(recorded, plan).lengths == tuple(tuple(o.metrics.acceptance_lengths) for o in outputs)


@pytest.fixture(scope="module")
def eagle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ablation") / "engine"
    compile_engine(BuildRequest(target="tiny-eagle3", output=path))
    return path


@pytest.fixture(scope="module")
def eagle(eagle_directory: Path) -> Iterator[Session]:
    with closing(Session(eagle_directory)) as session:
        yield session


@pytest.mark.parametrize("nodes", [5, 48])
@pytest.mark.parametrize("policy", [EAGLE2, HEAP], ids=lambda policy: policy.name)
def test_drafts_by_levels_serve_trees_of_every_size(eagle: Session, policy: Policy, nodes: int) -> None:
    """The heap over what the drafter expanded is EAGLE-2's tree."""
    texts = texts_of(eagle)
    found = replay(record(eagle.engine, texts, EXPANDED), TreePlan(policy, nodes, LEVELS))
    outputs = [decode(eagle, ids[:start], tree_budget=nodes) for ids, start in texts]
    assert found.lengths == tuple(tuple(o.metrics.acceptance_lengths) for o in outputs)


# The whole


def test_larger_trees_leave_fewer_rows_for_text() -> None:
    manifest = make_manifest(6, "dflash", 4, Limits(max_seq_len=2048))
    limits = limits_for(manifest, 1024)
    assert (limits.max_tree_budget, limits.max_seq_len) == (1024, 1280)
    assert limits.cache_rows == manifest.limits.cache_rows
    assert limits_for(manifest, 256) is manifest.limits
    for refused, nodes in ((manifest, 4000), (replace(manifest, backend="tensorrt"), 512)):
        with pytest.raises(UsageError, match=r"more than the plans or the cache .*--max-tree-budget"):
            limits_for(refused, nodes)


def test_parts_of_a_build_are_measured_for_every_size() -> None:
    rows = build_times(known([random_draft(i) for i in range(4)], (1, 2, 3, 4, 5)), (2, 8))
    assert [row["nodes"] for row in rows] == [2, 8] and min(min(row.values()) for row in rows) > 0
    assert build_times([], (2, 8)) == []


def test_the_command_answers_every_question(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with trees of more nodes than the engine was built for."""
    before = load_manifest(tiny_engine)
    words = "--limit 2 --max-tokens 24 --budgets 8,300 --depths 2 --temperatures 0,1 --timed-prompts 1"
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["ablate", str(tiny_engine), *words.split(), *files])
    main()
    out, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    for heading in ("τ by policy", "at most so deep", "tokens committed, %", "parts of tree_build", "decoded"):
        assert heading in out
    assert "its cache takes 2004 tokens beside trees of 300 nodes" in out
    assert {(r["policy"], r["nodes"]) for r in found["policies"]} == {(p.name, n) for p in POLICIES for n in (8, 300)}
    assert {(r["depth"], r["nodes"]) for r in found["depths"]} == {(d, n) for d in (2, 15) for n in (8, 300)}
    assert [r["case"] for r in found["budgets"]] == ["ar", "dflash", "ddtree@8", "ddtree@300"]
    assert {r["temperature"] for r in found["temperatures"]} == {0.0, 1.0}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert load_manifest(tiny_engine) == before


def test_drafters_of_other_kinds(
    eagle_directory: Path, tmp_path: Path, no_measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair head has more tokens a round than its marginals; a drafter by levels is answered for; one of chains is
    refused."""
    compile_engine(BuildRequest(target="tiny-dspark", output=tmp_path / "engine"))
    found = ablate(tmp_path / "engine", budgets=(8, 32), limit=4, max_tokens=48, timed_prompts=0)
    tau = {(row.candidates, row.nodes): row.tau for row in found["conditionals"]}
    assert all(tau["conditionals", nodes] > 1.03 * tau["marginals", nodes] for nodes in (8, 32))
    levels = ablate(eagle_directory, budgets=(8, 300), limit=1, max_tokens=16, timed_prompts=1)
    assert levels["conditionals"] == [] and levels["draft_length"] == LEVELS and "eagle@300" in text(levels)
    monkeypatch.setattr("workbench.ablate.load_manifest", lambda _: make_manifest(6, "autoregressive", 4, Limits()))
    with pytest.raises(UsageError, match="which drafts chains; ablate compares trees"):
        ablate(tmp_path / "engine")
