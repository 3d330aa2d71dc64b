"""Ablations: replays are the rounds of decoding, and trees are what their names say."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_manifest

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.bench.measure import Session, load_prompts
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.kind import EXPANDED, LEVELS
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import Bilinear, Candidates, DraftTree, Marginals
from workbench import drafts
from workbench.ablate import POLICIES, beam, chain, eagle2, heap, main, replay
from workbench.drafts import Text, record


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


@given(st.integers(0, 100), st.integers(1, 20))
def test_policies_follow_conditionals(seed: int, nodes: int) -> None:
    """With all candidates EAGLE-2's tree is that of the heap; the chain follows each best child; trees nest."""
    drafted = random_bilinear(seed)
    assert set(paths_of(eagle2(drafted, nodes, 3, 64))) == set(paths_of(heap(drafted, nodes, 3)))
    row, best = 0, []
    for _ in range(3):
        _, tokens, rows = drafted.child_log_probs([row])
        row = int(rows[0, 0])
        best.append(int(tokens[0, 0]))
    assert paths_of(chain(drafted, 3, 3))[-1] == tuple(best)
    for grow in (heap, chain, partial(eagle2, width=2), partial(beam, width=2)):
        assert paths_of(grow(drafted, nodes, 3))[:3] == paths_of(grow(drafted, min(nodes, 3), 3))


def known(drafts: list[Any], tokens: tuple[int, ...]) -> list[Text]:
    return [Text(tokens, drafts)]


def test_a_replay_follows_the_text() -> None:
    drafted = Marginals(np.log(np.array([[0.6, 0.4], [0.5, 0.5]], np.float32)), np.array([[1, 2], [3, 4]], np.int32))
    # Behind 9: 2, 3, then 5 is the target's own; behind 5 nothing is right; behind 8 the text ends.
    found = replay(known([drafted] * 5, (9, 2, 3, 5, 8, 1)), partial(heap, nodes=6, depth=2))
    assert (found.lengths, found.histogram) == (((3, 1, 1),), {1: 2, 3: 1})
    assert found.tau == pytest.approx(5 / 3) and found.expected == pytest.approx(3)  # every prefix: 1 + 1 + 1


def check_replays(
    session: Session, top_k: int, ways: Sequence[tuple[Callable[[Candidates], DraftTree], dict[str, Any]]]
) -> None:
    """Round by round the lengths of the engine's own decoding with those trees, also to the last one."""
    prompts = [session.codec.encode(p.opening) for p in load_prompts(("tiny",), 3)]
    recorded = record(session, prompts, 40, top_k)
    assert session.engine.length(0) == 0
    for grow, params in ways:
        outputs = [session.generate(ids, SamplingParams(max_tokens=40, **params))[0] for ids in prompts]
        assert replay(recorded, grow).lengths == tuple(tuple(o.metrics.acceptance_lengths) for o in outputs)


@pytest.fixture(scope="module")
def eagle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ablation") / "engine"
    compile_engine(BuildRequest(target="tiny-eagle3", output=path))
    return path


def test_replays_are_the_rounds_of_decoding(tiny_engine: Path, eagle_directory: Path, tmp_path: Path) -> None:
    """Of drafts in a block and by levels, where the heap over what was expanded is EAGLE-2's tree."""
    with closing(Session(tiny_engine)) as session:
        heaps = [(partial(heap, nodes=nodes, depth=15), {"tree_budget": nodes}) for nodes in (5, 64)]
        check_replays(session, 64, [*heaps, (partial(chain, nodes=15, depth=15), {"method": "dflash"})])
    with closing(Session(eagle_directory)) as session:
        sizes = ((eagle2, 5), (heap, 48))
        ways = [(partial(grow, nodes=nodes, depth=LEVELS), {"tree_budget": nodes}) for grow, nodes in sizes]
        check_replays(session, EXPANDED, ways)
        with pytest.raises(UsageError, match="only a block drafter's marginals"):
            drafts.save(record(session, [[5, 6, 7]], 4, EXPANDED), tmp_path / "none.npz")


def test_the_command_answers_all(tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with trees of more nodes than the engine was built for."""
    before = load_manifest(tiny_engine)
    main(tiny_engine, limit=2, max_tokens=24, budgets="8,300", depths="2", output=tmp_path / "a.json")
    out, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "τ by policy" in out
    assert "its cache takes 2004 tokens beside trees of 300 nodes" in out
    assert {(r["policy"], r["nodes"]) for r in found["policies"]} == {(p, n) for p in POLICIES for n in (8, 300)}
    assert {(r["depth"], r["nodes"]) for r in found["depths"]} == {(d, n) for d in (2, 15) for n in (8, 300)}
    assert load_manifest(tiny_engine) == before


def test_drafters_of_other_kinds(tmp_path: Path, no_measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair head has more tokens a round than its marginals; a drafter of chains is refused."""
    compile_engine(BuildRequest(target="tiny-dspark", output=tmp_path / "engine"))
    found = main(tmp_path / "engine", budgets="8,32", limit=4, max_tokens=48)
    tau = {(row.candidates, row.nodes): row.tau for row in found["conditionals"]}
    assert all(tau["conditionals", nodes] > 1.03 * tau["marginals", nodes] for nodes in (8, 32))
    monkeypatch.setattr("workbench.ablate.load_manifest", lambda _: make_manifest(6, "autoregressive", 4, Limits()))
    with pytest.raises(UsageError, match="which drafts chains; ablate compares trees"):
        main(tmp_path / "engine")
