"""The EAGLE-3 drafter: which nodes it expands, the rows of its cache, and every number against PyTorch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET_DIMS, drafter_weights, make_eagle, make_target
from dflash_truth import Eagle3
from engine_builds import build_engine, build_torch_engine
from hypothesis import given
from hypothesis import strategies as st
from numerics import Measured, Truth, assert_close, path_to, random_tree
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Limits, load_manifest
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, NewRows
from ddtree_trt.drafters.kind import EXPANDED
from ddtree_trt.errors import EngineError
from ddtree_trt.models.families import QWEN2
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.passes import SlotLengths
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import DraftTree, LinkedRows, TokenTree

K = 4


def request(bonus: int, *, length: int = 4, slot: int = 0) -> DraftRequest:
    return DraftRequest(slot, bonus, K, length)


class Scripted:
    """A network whose candidates are a function of the path, and an output is the path itself."""

    def __init__(self, slots: int = 1, rows: int = 256) -> None:
        self.cache = SlotLengths(slots, rows)
        self.absorbed: list[dict[int, int]] = []  # rows of each slot of each pass
        self.expanded: list[Sequence[NewRows]] = []
        self.barren = -1  # a bonus token behind whose children nothing is possible

    def join(self, pieces: Sequence[Any]) -> Any:
        return np.concatenate(pieces)

    def absorb(self, rows: Sequence[NewRows], top_k: int) -> Level:
        for each in rows:
            assert each.first == len(each.tree) - 1 == len(each.states) - 1 >= 0
        self.absorbed.append({each.slot: len(each.tree) for each in rows})
        return self._level([(int(each.tree.token_ids[-1]),) for each in rows], top_k)

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        self.expanded.append(rows)
        return self._level([path for each in rows for path in paths_in(each)[each.first :]], top_k)

    def _level(self, paths: list[tuple[int, ...]], top_k: int) -> Level:
        found = [candidates(path, top_k) for path in paths]
        log_probs = np.stack([f[0] for f in found])
        log_probs[[len(path) > 1 and path[0] == self.barren for path in paths]] = -np.inf
        return Level(paths, log_probs, np.stack([f[1] for f in found]))


def paths_in(nodes: NewRows) -> list[tuple[int, ...]]:
    """Of every node."""
    return [(*feature, token) for feature, token in zip(nodes.states, nodes.tree.token_ids.tolist(), strict=True)]


def candidates(path: tuple[int, ...], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities falling and ids [k] of the tokens behind a path."""
    rng = np.random.default_rng(path)
    probs = np.sort(rng.dirichlet(np.full(16, 0.4)))[::-1][:k]
    return np.log(probs + 1e-9).astype(np.float32), rng.permutation(16)[:k].astype(np.int32)


def drafted(bonus: int, *, width: int = 3, length: int = 4) -> tuple[LinkedRows, Scripted]:
    network = Scripted()
    drafter = EagleDrafter(network, 64, 64, width)
    drafter.append_context(0, np.array([1, 2]), np.array([[10.0], [20.0]]))
    (draft,) = drafter.draft([request(bonus, length=length)])
    assert isinstance(draft.candidates, LinkedRows)
    return draft.candidates, network


def paths_of(rows: LinkedRows, bonus: int) -> dict[tuple[int, ...], float]:
    """Every candidate's path with its log-weight, by following the links; asserts that each row is its path's."""
    found: dict[tuple[int, ...], float] = {}
    visited = set()

    def visit(row: int, path: tuple[int, ...], weight: float) -> None:
        visited.add(row)
        log_probs, ids = candidates(path, K)
        np.testing.assert_array_equal(rows.token_ids[row], ids)
        np.testing.assert_array_equal(rows.log_probs[row], log_probs)
        for column, token in enumerate(ids.tolist()):
            child = (*path, token)
            found[child] = weight + float(log_probs[column])
            if rows.next_rows[row, column] >= 0:
                visit(int(rows.next_rows[row, column]), child, found[child])

    visit(0, (bonus,), 0.0)
    assert visited == set(range(len(rows.log_probs)))
    return found


def paths_within(tree: DraftTree, bonus: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [(bonus,)]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def expanded_of(bonus: int, *, width: int, length: int) -> list[set[tuple[int, ...]]]:
    """The nodes each pass expands, by the rules themselves."""
    weights: dict[tuple[int, ...], float] = {
        (bonus, int(t)): float(p) for p, t in zip(*candidates((bonus,), K), strict=True)
    }
    passes: list[set[tuple[int, ...]]] = []
    last = set(weights)
    for _ in range(1, length):
        chosen = set(sorted(last, key=lambda path: -weights[path])[:width])
        passes.append(chosen)
        last = set()
        for path in chosen:
            for p, t in zip(*candidates(path, K), strict=True):
                child = (*path, int(t))
                weights[child] = weights[path] + float(p)
                last.add(child)
    return passes


@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 6))
def test_each_pass_expands_the_most_probable_of_the_last_level(bonus: int, width: int, length: int) -> None:
    """As EAGLE-2 does; its tree, the most probable of all that was drafted, is the heap's."""
    rows, network = drafted(bonus, width=width, length=length)
    ranked = sorted(paths_of(rows, bonus).items(), key=lambda node: -node[1])
    for nodes in (1, 7, len(ranked)):
        assert paths_within(rows.best_first(nodes), bonus) == {path for path, _ in ranked[:nodes]}
    expected = expanded_of(bonus, width=width, length=length)
    assert [set(paths_in(nodes)[nodes.first :]) for (nodes,) in network.expanded] == expected


def test_slots_grow_in_the_same_passes_until_each_ends() -> None:
    """By its length, or where nothing is possible; each with its own number of candidates."""
    asked = [request(3, slot=2), request(7, slot=0), DraftRequest(1, 5, 2, 2)]
    drafts = []
    for calls in ([asked], [[each] for each in asked]):
        network = Scripted(3)
        network.barren = 7
        drafter = EagleDrafter(network, 64, 64, width=3)
        for slot in range(3):
            drafter.append_context(slot, np.arange(1 + slot), np.ones((1 + slot, 1)))
        drafts.append([draft.candidates for call in calls for draft in drafter.draft(call)])
        if calls == [asked]:
            assert network.absorbed == [{2: 3, 0: 1, 1: 2}]
            assert [[rows.slot for rows in each] for each in network.expanded] == [[2, 0, 1], [2], [2]]
    for found, expected in zip(*drafts, strict=True):
        for name, values in vars(expected).items():
            np.testing.assert_array_equal(getattr(found, name), values)


def test_a_draft_that_may_expand_more_nodes_than_there_are_rows_for_is_an_error() -> None:
    network = Scripted()
    drafter = EagleDrafter(network, 64, 15, width=3)
    drafter.append_context(0, np.array([1]), np.array([[10.0]]))
    with pytest.raises(EngineError, match=r"7 levels with 3 nodes .* need 18 rows, .* has 15"):
        drafter.draft([request(7, length=7)])
    assert not network.absorbed and not network.expanded
    drafter.draft([request(7, length=6)])
    assert len(network.expanded[-1][0].tree) == 15


def test_another_token_behind_a_row_is_an_error() -> None:
    drafter = EagleDrafter(Scripted(), 64, 64)
    drafter.append_context(0, np.array([1, 2]), np.array([[10.0], [20.0]]))
    drafter.draft([request(5)])
    with pytest.raises(EngineError, match="last row was made with token 5, and 6 follows"):
        drafter.append_context(0, np.array([6]), np.array([[30.0]]))


# Numbers, against a plain statement of EAGLE-3 in PyTorch


TOP_K, LEVELS, LAYERS = 5, 4, 8
Build = Callable[..., Measured]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "own-width": {
        **{"own_embedding": True, "target_hidden_size": 32, "hidden_size": 48, "num_heads": 2},
        "norm_before_residual": True,
    },
    "normed-output": {"norm_output": True, "tap_layers": (0, 7), "draft_vocab_size": None},
    "head-of-the-target": {"own_head": False, "draft_vocab_size": None, "family": QWEN2, "tap_layers": (0, 2, 3, 5, 6)},
}


class Slot:
    """A slot of an engine beside the truth: drafts are compared row by row."""

    def __init__(self, engine: Measured, slot: int, target: Truth, drafter: Eagle3) -> None:
        self.engine, self.slot, self.target, self.drafter = engine, slot, target, drafter
        self.tokens: list[int] = []

    def prefill(self, tokens: list[int]) -> None:
        self.engine.prefill(self.slot, np.array(tokens), rows="last", taps=True)
        self.tokens += tokens

    def check(self, bonus: int, draft: Draft) -> None:
        rows, taps = draft.candidates, self.target(self.tokens)[1]
        assert isinstance(rows, LinkedRows)
        pending: list[tuple[int, list[int]]] = [(0, [])]
        for row, drafted in pending:
            expected = self.drafter(taps, [*self.tokens, bonus], drafted)
            what = f"row behind {len(self.tokens)} tokens and {drafted}"
            assert_close(rows.log_probs[row], -np.sort(-expected)[:TOP_K], what)
            by_token = dict(zip(self.drafter.target_ids.tolist(), expected, strict=True))
            found = np.array([by_token[t] for t in rows.token_ids[row].tolist()], np.float32)
            assert_close(rows.log_probs[row], found, f"{what}, by token")
            links = zip(rows.next_rows[row].tolist(), rows.token_ids[row].tolist(), strict=True)
            pending += [(next_row, [*drafted, token]) for next_row, token in links if next_row >= 0]
        assert len(pending) == len(rows.log_probs) == 1 + TOP_K + EXPANDED * (LEVELS - 2)

    def commit(self, root: int, path: list[int], rng: np.random.Generator) -> None:
        """Verify a branching tree below `root` and keep a path of it."""
        tokens = np.array([root, *rng.integers(0, 96, 5)])
        tree = TokenTree(tokens, np.array([-1, 0, 0, 1, 2, 4], np.int32), np.array([0, 1, 1, 2, 2, 3], np.int32))
        self.engine.verify([VerifyRequest(self.slot, tree)])
        self.engine.commit(self.slot, np.array(path, np.int32), taps=True)
        self.tokens += tokens[path].tolist()


def draft(slots: list[Slot], bonus: int) -> None:
    drafts = slots[0].engine.draft([DraftRequest(slot.slot, bonus, TOP_K, LEVELS) for slot in slots])
    for slot, found in zip(slots, drafts, strict=True):
        slot.check(bonus, found)


def slots_of(path: Path, build: Build, *, tied: bool = True, longest: int = 512, **shape: Any) -> list[Slot]:
    """Two slots of an engine of this shape, with positions for `longest` tokens."""
    target = make_target(path / "target", num_layers=LAYERS, tied=tied, max_positions=longest)
    drafter = make_eagle(path / "drafter", max_positions=longest, **shape)
    engine = build(target, drafter, path / "engine", max_batch=2)
    dims = engine.manifest.drafting.dims
    assert dims.own_head == shape.get("own_head", True)
    truth = Truth(target, dims.tap_layers)
    tables = truth.model.model.embed_tokens, truth.model.lm_head
    plain = Eagle3(dims, drafter_weights(dims, 1), *(table.weight.detach() for table in tables))
    return [Slot(engine, n, truth, plain) for n in range(2)]


@pytest.mark.parametrize("build", [build_engine, build_torch_engine])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds(tmp_path: Path, shape: str, build: Build) -> None:
    """Of two slots: prompts, then rounds of uneven length and one without a draft."""
    rng = np.random.default_rng(3)
    slots = slots_of(tmp_path, build, tied=shape != "head-of-the-target", **SHAPES[shape])
    for slot, size in zip(slots, (11, 1), strict=True):
        slot.prefill(rng.integers(0, 96, size).tolist())
    for bonus, *paths in ((5, [0, 2, 4, 5], [0, 1]), (9, [0], [0, 1, 3]), (30, [0, 1], [0, 2])):
        draft(slots, bonus)
        for slot, path in zip(slots, paths, strict=True):
            slot.commit(bonus, path, rng)
    for slot in slots:
        slot.commit(7, [0, 1, 3], rng)
    draft(slots, 8)
    slots[0].engine.truncate(0, 9)
    assert slots[0].engine.draftable(0, 99) == 9
    following = slots[0].tokens[9]  # with which the drafter's last row was made
    del slots[0].tokens[9:]
    slots[0].prefill([following, 7, 8])
    draft(slots[:1], 8)


def test_a_long_prompt_takes_several_passes(tmp_path: Path) -> None:
    """Longer than a chunk; a drafted row then sees all of it."""
    rng, chunk = np.random.default_rng(4), Limits.prefill_chunk
    slot, _ = slots_of(tmp_path, build_engine, longest=2048)
    for size in (chunk, chunk, 30):
        slot.prefill(rng.integers(0, TARGET_DIMS.vocab_size, size).tolist())
    draft([slot], 3)


# Drafts of all slots in one call, beside those of one slot after another: bit for bit the same in ONNX Runtime


PROMPTS = (1, Limits.prefill_chunk + 44, 7, 31, 2)  # tokens of each slot's: one takes two passes
SLOTS = len(PROMPTS)


@pytest.mark.parametrize(("kind", "precision"), [("eagle3", "int8"), ("autoregressive", "fp32")])
def test_drafts_together_are_those_alone(tmp_path: Path, kind: str, precision: str) -> None:
    """Of any of the slots, behind contexts of any length, with their own lengths, candidates and draws."""
    target = make_target(tmp_path / "target", num_layers=8, max_positions=512)
    if kind == "eagle3":
        drafter = make_eagle(tmp_path / "drafter", max_positions=512)
    else:
        drafter = make_target(tmp_path / "drafter", num_layers=1, tied=False, seed=3, max_positions=512)
    together = build_engine(target, drafter, tmp_path / "engine", max_batch=SLOTS, precision=precision)
    alone = OrtEngine(tmp_path / "engine", load_manifest(tmp_path / "engine"))
    rng = np.random.default_rng(1)
    for slot, size in enumerate(PROMPTS):
        prompt = rng.integers(0, TARGET_DIMS.vocab_size, size)
        for start in range(0, size, Limits.prefill_chunk):
            for engine in (together, alone):
                engine.prefill(slot, prompt[start : start + Limits.prefill_chunk], rows="none", taps=True)
    for count in (SLOTS, 3, 1, SLOTS):
        requests = []
        for slot in rng.permutation(SLOTS)[:count].tolist():
            bonus, top_k, length = (int(rng.integers(*bounds)) for bounds in ((0, 96), (1, 17), (1, 7)))
            params = SamplingParams(temperature=1.0, seed=slot)
            draw = Sampler(params, TARGET_DIMS.vocab_size, [bonus], frozenset()).draft
            requests.append(DraftRequest(slot, bonus, top_k, length, draw))
        for request, found in zip(requests, together.draft(requests), strict=True):
            (expected,) = alone.draft([request])
            for name, values in vars(expected.candidates).items():
                np.testing.assert_array_equal(getattr(found.candidates, name), values)
            assert vars(found.candidates)["log_probs"].shape[1] == min(request.top_k, 60 if kind == "eagle3" else 96)
            if isinstance(expected.candidates, LinkedRows) and request.top_k > 1 and request.length > 2:
                assert (expected.candidates.next_rows >= 0).sum(1).max() > 1, "a branching tree"
            tokens = [[drawn.token for drawn in draft.drawn or ()] for draft in (found, expected)]
            assert tokens[0] == tokens[1] and len(tokens[0]) == (0 if kind == "eagle3" else request.length)
            tree = random_tree(rng, 9, TARGET_DIMS.vocab_size)
            tree.token_ids[0] = request.bonus_token
            path = path_to(tree, int(rng.integers(9)))
            for engine in (together, alone):
                engine.verify([VerifyRequest(request.slot, tree)])
                engine.commit(request.slot, path, taps=True)


def test_padded_passes_of_a_drafter_that_is_its_target_are_always_right(tmp_path: Path) -> None:
    target, prompts = make_target(tmp_path / "target"), [[5, 9, 2, 40, 7], [3], [8, 1] * 40]
    build_torch_engine(target, make_target(tmp_path / "drafter", tokenizer=False), tmp_path / "engine").close()
    with LLM(tmp_path / "engine") as llm:
        params = SamplingParams(method="draft-model", tree_budget=4, max_tokens=1 + 5 * 8, ignore_eos=True)
        assert [o.metrics.acceptance_lengths for o in llm.generate(prompts, params)] == [[5] * 8] * 3
