"""Ablations: replays are the rounds of decoding, and policies are what their names say, by brute force."""

from __future__ import annotations

import json
import struct
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_results import make_engine, make_environment
from command_line import in_this_process
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_manifest

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.bench.ablation.picture import draw
from ddtree_trt.bench.ablation.policies import BEAM, CHAIN, EAGLE2, HEAP, POLICIES, without_conditions
from ddtree_trt.bench.ablation.recording import RecordedText, record, replay_rounds
from ddtree_trt.bench.ablation.result import AblationResult, BuildRow, TimeRow, TreeRow, lines, markdown, tables
from ddtree_trt.bench.ablation.run import build_times, limits_for, run_ablation
from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.bench.ablation.trees import Trees
from ddtree_trt.bench.prompts import load_prompts
from ddtree_trt.bench.session import Session
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.candidates import Bilinear, Candidates, Marginals
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import DraftTree


def random_draft(seed: int, length: int = 4, candidates: int = 5) -> Marginals:
    """A draft without ties."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(-np.log(rng.dirichlet(np.ones(candidates) / 2, length)), axis=1)
    tokens = np.stack([rng.permutation(100)[:candidates] for _ in range(length)])
    return Marginals(log_probs.astype(np.float32), tokens.astype(np.int32))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tree's prefixes, as tokens from the root down."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert [len(path) for path in paths[1:]] == tree.depths.tolist()
    return set(paths[1:])


# Policies


def test_impossible_candidates_are_left_out() -> None:
    """Of a drafter with fewer words than candidates were asked for."""
    draft = random_draft(0)
    draft.log_probs[:, 2:] = -np.inf
    for policy in (EAGLE2, BEAM):
        assert len(policy.make(draft, 40, 4, 5)) <= 2 + 4 + 8 + 16
        assert np.isfinite(policy.make(draft, 40, 4, 5).log_weights).all()


def random_bilinear(seed: int) -> Bilinear:
    rng = np.random.default_rng(seed)
    unary = -np.sort(-rng.normal(size=(3, 4)), axis=1)
    tokens = np.stack([rng.permutation(100)[:4] for _ in range(3)])
    factors = rng.normal(size=(2, 3, 4, 2))
    left, right = factors.astype(np.float32)
    return Bilinear(unary.astype(np.float32), tokens.astype(np.int32), left, right)


@given(st.integers(0, 100), st.integers(1, 20))
def test_policies_follow_conditionals(seed: int, nodes: int) -> None:
    """With all candidates every policy that reranks has the tree of the heap; the chain follows each best child."""
    given_parents = random_bilinear(seed)
    heap = paths_of(HEAP.make(given_parents, nodes, 3, 0))
    assert paths_of(EAGLE2.make(given_parents, nodes, 3, 64)) == heap
    row = 0
    chain: tuple[int, ...] = ()
    for _ in range(3):
        _, tokens, rows = given_parents.child_log_probs([row])
        row, chain = int(rows[0, 0]), (*chain, int(tokens[0, 0]))
    assert max(paths_of(CHAIN.make(given_parents, 3, 3, 1)), key=len) == chain


def test_marginals_are_those_before_the_parent_is_known() -> None:
    given_parents = random_bilinear(0)
    plain = without_conditions(given_parents)
    assert plain is not None
    weights = np.exp(given_parents.unary.astype(np.float64))
    np.testing.assert_allclose(np.exp(plain.log_probs), weights / weights.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(plain.token_ids, given_parents.token_ids)
    assert without_conditions(plain) is None


# Replays


def _heap(nodes: int, candidates: Candidates) -> DraftTree:
    return HEAP.make(candidates, nodes, 15, 0)


def test_replays_are_the_rounds_of_decoding(tiny_engine: Path) -> None:
    """Round by round: the same lengths as the engine's own decoding with that tree, also to the last one."""
    with closing(Session(tiny_engine)) as session:
        prompts = [session.codec.encode(p.opening) for p in load_prompts(("tiny",), 3)]

        def decode(ids: list[int], **params: Any) -> Any:
            output, _ = session.generate(ids, SamplingParams(max_tokens=48, temperature=0.0, **params))
            return output

        texts = [(ids + decode(ids, method="ar").outputs[0].token_ids, len(ids)) for ids in prompts]
        recorded = record(session.engine, texts, 64, lambda *_: pytest.fail("a block is not drawn"))
        assert session.engine.length(0) == 0
        for nodes in (5, 64):
            expected = [tuple(decode(ids, tree_budget=nodes).metrics.acceptance_lengths) for ids in prompts]
            assert replay_rounds(recorded, partial(_heap, nodes)).lengths == tuple(expected)
        chains = [tuple(decode(ids, method="dflash").metrics.acceptance_lengths) for ids in prompts]
        assert replay_rounds(recorded, lambda d: CHAIN.make(d, 15, 15, 1)).lengths == tuple(chains)


def texts_of(drafts: list[Marginals], tokens: tuple[int, ...]) -> list[RecordedText]:
    return [RecordedText((7, *tokens), 1, tuple(drafts))]


def test_a_replay_follows_the_text() -> None:
    draft = Marginals(np.log(np.array([[0.6, 0.4], [0.5, 0.5]], np.float32)), np.array([[1, 2], [3, 4]], np.int32))
    # Behind 9: 2, 3, then 5 is the target's own; behind 5 nothing is right; behind 8 the text ends.
    text = texts_of([draft] * 5, (9, 2, 3, 5, 8, 1))
    found = replay_rounds(text, lambda d: HEAP.make(d, 6, 2, 0))
    assert found.lengths == ((3, 1, 1),)
    assert found.tau == pytest.approx(5 / 3)
    assert found.histogram == {1: 2, 3: 1}
    assert found.nodes == 6
    assert found.expected == pytest.approx(3)  # every prefix: 1 + 1 + 1


def test_more_nodes_or_depth_never_promise_less() -> None:
    text = texts_of([random_draft(i) for i in range(3)], (9, 2, 3, 5))
    settings = AblationSettings("engine", budgets=(2, 8, 30), depths=(1, 2))
    trees = Trees(text, settings, 4, lambda *_: None)
    rows = {(row.nodes, row.depth): row.expected for row in trees.depths()}
    assert set(rows) == {(n, d) for n in (2, 8, 30) for d in (1, 2, 4)}
    assert all(rows[n, 4] >= rows[n, 2] >= rows[n, 1] for n in (2, 8, 30))
    best_of = {(row.nodes, row.policy): row for row in trees.policies()}
    assert all(best_of[n, "heap"].expected >= best_of[n, p.name].expected - 1e-9 for n in (2, 8, 30) for p in POLICIES)
    assert best_of[8, "beam"].width in (1, 2, 4, 8) and best_of[8, "heap"].width is None


def test_conditionals_are_compared_with_their_marginals() -> None:
    texts = [RecordedText((7, 9, 2, 3, 5), 1, tuple(random_bilinear(i) for i in range(3)))]
    rows = Trees(texts, AblationSettings("engine", budgets=(2, 8)), 3, lambda *_: None).conditionals()
    assert [(row.candidates, row.nodes) for row in rows] == [
        (kind, n) for kind in ("marginals", "conditionals") for n in (2, 8)
    ]
    only = Trees(texts_of([random_draft(0)] * 3, (9, 2, 3, 5)), AblationSettings("engine"), 4, lambda *_: None)
    assert only.conditionals() == ()


def test_parts_of_a_build_are_measured_for_every_size() -> None:
    rows = build_times(texts_of([random_draft(i) for i in range(4)], (1, 2, 3, 4, 5)), (2, 8))
    assert [row.nodes for row in rows] == [2, 8]
    assert all(min(row.copy_ms, row.heap_ms, row.visibility_ms) > 0 for row in rows)
    assert build_times([], (2, 8)) == ()


# Limits


def test_larger_trees_leave_fewer_rows_for_text() -> None:
    manifest = make_manifest(6, "dflash", 4, Limits(max_seq_len=2048))
    limits = limits_for(Path("engine"), manifest, 1024)
    assert (limits.max_tree_budget, limits.max_seq_len) == (1024, 1280)
    assert limits.cache_rows == manifest.limits.cache_rows
    assert limits_for(Path("engine"), manifest, 256) is manifest.limits
    with pytest.raises(UsageError, match="2305 rows, which is no room for a tree of 4000"):
        limits_for(Path("engine"), manifest, 4000)


def test_plans_are_for_their_trees() -> None:
    manifest = replace(make_manifest(6, "dflash", 4, Limits()), backend="tensorrt")
    with pytest.raises(UsageError, match=r"its plans were built for.*--max-tree-budget"):
        limits_for(Path("engine"), manifest, 512)


def test_an_engine_without_trees_is_refused(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(6, "autoregressive", 4, Limits())
    monkeypatch.setattr("ddtree_trt.bench.ablation.run.load_manifest", lambda _: manifest)
    with pytest.raises(UsageError, match="autoregressive drafter, which drafts chains; ablate compares trees"):
        run_ablation(AblationSettings(str(tiny_engine)))


@pytest.mark.parametrize(
    ("change", "text"),
    [({"budgets": ()}, "at least one of budgets"), ({"budgets": (0,)}, "budgets"), ({"timed_prompts": -1}, "timed")],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        AblationSettings("engine", **change)


# The command


def test_the_command_answers_every_question(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with trees of more nodes than the engine was built for, which decode to the same text."""
    pytest.importorskip("matplotlib")
    ddtree = in_this_process(capsys)
    json_file, markdown_file, picture = tmp_path / "a.json", tmp_path / "new" / "a.md", tmp_path / "a.png"
    before = load_manifest(tiny_engine)
    code, out, err = ddtree(
        *("ablate", tiny_engine, "--limit", 2, "--max-tokens", 24, "--budgets", "8,300", "--depths", "2"),
        *("--temperatures", "0,1", "--timed-prompts", 1),
        *("--json", json_file, "--markdown", markdown_file, "--plot", picture),
    )
    assert (code, err) == (0, ""), err
    for heading in ("τ by policy", "at most so deep", "tokens committed, %", "parts of tree_build", "decoded at"):
        assert heading in out and heading in markdown_file.read_text()
    assert "built for trees of 256 nodes; with 300 its cache takes 2004 tokens instead of 2048" in " ".join(out.split())
    found = json.loads(json_file.read_text())
    assert {(row["policy"], row["nodes"]) for row in found["policies"]} == {
        (policy, nodes) for policy in ("heap", "eagle2", "beam", "chain") for nodes in (8, 300)
    }
    assert {(row["depth"], row["nodes"]) for row in found["depths"]} == {(d, n) for d in (2, 15) for n in (8, 300)}
    assert [row["case"] for row in found["budgets"]] == ["ar", "dflash", "ddtree@8", "ddtree@300"]
    assert {row["temperature"] for row in found["temperatures"]} == {0.0, 1.0}
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert load_manifest(tiny_engine) == before


def test_lists_that_are_no_numbers_are_refused(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_this_process(capsys)("ablate", tiny_engine, "--budgets", "8,many")
    assert (code, out) == (2, "")
    assert "--budgets must be numbers separated by commas, not '8,many'" in err


# Tables and the picture


def make_ablation(**changes: Any) -> AblationResult:
    def tree(policy: str, nodes: int, depth: int = 15, width: int | None = None) -> TreeRow:
        return TreeRow(policy, "marginals", nodes, depth, width, 3.5, nodes, 3.2, {1: 3, 4: 1})

    times = tuple(TimeRow(case, 0.0, 2.0, 100.0, 10.0, 1.5, {"draft": 1.0}) for case in ("ar", "dflash", "ddtree@4"))
    values: dict[str, Any] = {
        "settings": AblationSettings("engine", budgets=(4, 8)),
        "engine": make_engine(),
        "environment": make_environment(),
        "texts": 3,
        "tokens": 90,
        "draft_length": 15,
        "notes": ("A note.",),
        "policies": tuple(tree(p, n, width=2 if p == "beam" else None) for p in ("heap", "beam") for n in (4, 8)),
        "depths": tuple(tree("heap", n, d) for n in (4, 8) for d in (2, 15)),
        "conditionals": (),
        "builds": (BuildRow(4, 0.1, 0.2, 0.3), BuildRow(8, 0.1, 0.3, 0.3)),
        "budgets": times,
        "temperatures": times,
    }
    return AblationResult(**{**values, **changes})


def test_tables_have_a_column_for_each_policy() -> None:
    found = dict(tables(make_ablation()))
    assert found["τ by policy, equal nodes"] == (
        ["nodes", "heap", "beam"],
        [["4", "3.50", "3.50 (width 2)"], ["8", "3.50", "3.50 (width 2)"]],
    )
    assert found["rounds of the heap by tokens committed, %"][1][0] == ["4", "75", "0", "0", "25"]
    assert "τ of the heap by candidates" not in found
    assert lines(make_ablation())[-1] == "A note."
    assert "| 4 | 3.50 | 3.50 (width 2) |" in markdown(make_ablation())


def test_a_busy_machine_is_said() -> None:
    busy = make_ablation(environment=make_environment(load_1min=9.0))
    assert any("Do not trust times" in line for line in lines(busy))
    assert not any("Do not trust" in line for line in lines(replace(busy, budgets=())))


def test_the_picture_has_one_size_and_is_repeatable(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, result in (("a", make_ablation()), ("b", make_ablation()), ("c", make_ablation(budgets=(), builds=()))):
        draw(result, tmp_path / f"{name}.png")
    pictures = [(tmp_path / f"{name}.png").read_bytes() for name in "abc"]
    assert pictures[0] == pictures[1]
    assert all(struct.unpack(">II", each[16:24]) == (1660, 1560) for each in pictures)


def test_legends_are_off_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None covers a place of any axes, and each is in the picture."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig

    def save_and_keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        drawn.append(figure)

    monkeypatch.setattr(figures.Figure, "savefig", save_and_keep)
    depths = tuple(replace(row, depth=depth) for depth in (1, 2, 4, 8, 15) for row in make_ablation().policies[:2])
    draw(make_ablation(depths=depths), tmp_path / "a.png")
    (figure,) = drawn
    legends = [axis.get_legend() for axis in figure.axes if axis.get_legend()]
    assert len(legends) == 6
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes), legend.axes.get_title()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_a_pair_head_is_compared_with_its_marginals(
    tmp_path: Path, no_measuring: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packaged head has more tokens a round than its marginals."""
    compile_engine(BuildRequest(target="tiny-dspark", output=tmp_path / "engine"))
    run = in_this_process(capsys)
    args = ("--budgets", "8,32", "--limit", 4, "--max-tokens", 48, "--timed-prompts", 0, "--json", tmp_path / "found")
    code, _, err = run("ablate", tmp_path / "engine", *args)
    assert code == 0, err
    rows = json.loads((tmp_path / "found").read_text())["conditionals"]
    tau = {(row["candidates"], row["nodes"]): row["tau"] for row in rows}
    assert set(tau) == {(kind, nodes) for kind in ("marginals", "conditionals") for nodes in (8, 32)}
    assert all(tau["conditionals", nodes] > 1.03 * tau["marginals", nodes] for nodes in (8, 32))
