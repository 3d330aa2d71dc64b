"""Tree build, mask, compaction and commit: the CUDA source, run on the CPU, against the host part and the reference."""

import itertools
from collections.abc import Callable
from typing import Any

import kernel_reference as reference
import numpy as np
import pytest
from numpy.typing import ArrayLike
from plugin_libraries import Guarded, aligned, check_in_child, emulated_kernels

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.plugins import MAX_DEVICE_BUDGET


def falling(rng: np.random.Generator, shape: tuple[int, int, int], tied: bool) -> np.ndarray:
    """log_probs [N, L, K] with falling rows; tied ones add without rounding, so that equal sums are exact."""
    values = rng.choice([0.0, -0.25, -0.5, -1.0, -np.inf], shape) if tied else -rng.exponential(2.0, shape)
    return -np.sort(-values.astype(np.float32), axis=2)


Place = Callable[[np.ndarray], np.ndarray]


def build(
    log_probs: np.ndarray, candidates: np.ndarray, tokens: int, budgets: np.ndarray | None = None,
    past_len: np.ndarray | None = None, outlook: int = 0, place: Place = lambda array: array,
) -> dict[str, np.ndarray]:  # fmt: skip
    n, length, width = log_probs.shape
    roots = place(np.arange(1000, 1000 + n, dtype=np.int32))
    out = {name: place(np.full((n, tokens), -7, np.int32)) for name in ("token_ids", "parents", "depths", "positions")}
    out["counts"] = place(np.full(n, -7, np.int32))
    if outlook:
        out["log_weights"] = place(np.full((n, outlook), np.nan, np.float32))
        out["outlook_depths"] = place(np.full((n, outlook), -7, np.int32))
    log_probs, candidates = place(log_probs), place(candidates)
    emulated_kernels().launch(
        "build_tree", log_probs=log_probs, candidates=candidates, root_tokens=roots, budgets=budgets,
        past_len=past_len, sequences=n, positions_l=length, candidates_k=width, tokens=tokens, outlook=outlook, **out,
    )  # fmt: skip
    return out


def check_build(log_probs: np.ndarray, tokens: int, budgets: np.ndarray | None, outlook: int = 0) -> None:
    rng = np.random.default_rng(0)
    n = len(log_probs)
    candidates = rng.integers(0, 50_000, log_probs.shape).astype(np.int32)
    past_len = rng.integers(0, 5000, n).astype(np.int32)
    out = build(log_probs, candidates, tokens, budgets, past_len, outlook)
    for i in range(n):
        budget = tokens - 1 if budgets is None else int(np.clip(budgets[i], 0, tokens - 1))
        ids, depths, parents, _ = _native.build_tree(log_probs[i], candidates[i], budget)
        count = len(ids) + 1
        assert out["counts"][i] == count
        np.testing.assert_array_equal(out["token_ids"][i], np.r_[1000 + i, ids, [1000 + i] * (tokens - count)])
        np.testing.assert_array_equal(out["parents"][i], np.r_[parents, [-1] * (tokens - count)])
        np.testing.assert_array_equal(out["depths"][i], np.r_[0, depths, [0] * (tokens - count)])
        np.testing.assert_array_equal(out["positions"][i], past_len[i] + out["depths"][i])
        if outlook:
            _, depths, _, weights = _native.build_tree(log_probs[i], candidates[i], outlook if budget else 0)
            none = outlook - len(weights)
            np.testing.assert_array_equal(out["log_weights"][i], np.r_[weights, [-np.inf] * none].astype(np.float32))
            np.testing.assert_array_equal(out["outlook_depths"][i], np.r_[depths, [0] * none])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (4, 6), (15, 16)])
def test_tree_build_equals_the_host(tied: bool, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[0] * 100 + shape[1])
    for tokens in (1, 2, 17, 33, 65):
        for outlook in (0, 1, 2 * tokens):
            log_probs = falling(rng, (8, *shape), tied)
            check_build(log_probs, tokens, rng.integers(-2, 70, 8).astype(np.int32), outlook)


@pytest.mark.parametrize("tied", [False, True])
def test_large_tree_build_equals_the_host(tied: bool) -> None:
    """Also one whose log-probabilities do not fit into shared memory."""
    rng = np.random.default_rng(1)
    for shape, outlook in (((1, 15, 64), 256), ((1, 17, MAX_DEVICE_BUDGET), MAX_DEVICE_BUDGET)):
        log_probs = falling(rng, shape, tied)
        log_probs[np.isneginf(log_probs)] = -3.0
        check_build(log_probs, 1 + MAX_DEVICE_BUDGET, None, outlook)
        check_build(log_probs, 3, None, outlook)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_prefixes_that_all_weigh_the_same_are_in_the_order_of_their_ranks(value: float) -> None:
    """Nothing but the climb to where two paths part decides, over all lanes' offers; zeros have one sign."""
    check_build(np.full((2, 6, 40), value, np.float32), 257, np.array([256, 60], np.int32), 1024)


@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 513, 1025])
def test_packed_mask_equals_the_host(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    parents = np.stack([reference.random_parents(rng, tokens) for _ in range(2)])
    for words in (-(-tokens // 32), -(-tokens // 32) + 2):
        mask = np.full((2, tokens, words), 0x55555555, np.int32)
        emulated_kernels().launch(
            "packed_mask", parents=parents, mask=mask, sequences=2, tokens=tokens, mask_words=words
        )
        for i in range(2):
            host = _native.packed_mask(parents[i])
            np.testing.assert_array_equal(mask[i, :, : host.shape[1]], host)
            assert not mask[i, :, host.shape[1] :].any()
            np.testing.assert_array_equal(mask[i], reference.packed_mask(parents[i], words))


def choose(
    logits: np.ndarray, positions: np.ndarray, temperatures: np.ndarray, seeds: np.ndarray, place: Place = np.array
) -> np.ndarray:
    given = [place(array) for array in (logits, positions, temperatures, seeds)]
    choices = place(np.full(positions.shape, -7, np.int32))
    names = "logits", "positions", "temperatures", "seeds"
    extents = dict(zip(("sequences", "tokens", "vocabulary"), logits.shape, strict=True))
    emulated_kernels().launch("choose", choices=choices, **extents, **dict(zip(names, given, strict=True)))
    return choices


@pytest.mark.parametrize("vocabulary", [1, 31, 5000])
def test_choices_are_the_reference_and_the_hosts(vocabulary: int) -> None:
    """At temperatures and without, with logits that are equal, −inf or NaN; no draw is like that of another row."""
    rng = np.random.default_rng(vocabulary)
    logits = (rng.normal(size=(4, 3, vocabulary)) * 3).astype(np.float32)
    logits[1, :, ::2] = logits[1].max(initial=0)
    logits[0, 1:, ::3] = logits[0].max(initial=0)
    logits[2, 1, 1::3] = -np.inf
    logits[3, 2, ::2] = np.nan
    positions = rng.integers(0, 1 << 20, (4, 3)).astype(np.int32)
    temperatures, seeds = np.array([0, 1, 0.3, 50], np.float32), rng.integers(-(2**63), 2**63, 4)
    found = choose(logits, positions, temperatures, seeds)
    np.testing.assert_array_equal(found, reference.choose(logits, positions, temperatures, seeds))
    seed = int(seeds[1]) % (1 << 64)
    for row, position, token in zip(logits[1], positions[1].tolist(), found[1].tolist(), strict=True):
        assert _native.draw_logits(row, 1.0, seed, position + 1) == token


def test_choices_of_nothing_are_in_the_vocabulary_and_read_no_further() -> None:
    def work() -> None:
        for at_end in (True, False):
            logits = np.full((2, 2, 700), -np.inf, np.float32)
            logits[1] = np.nan
            positions, seeds = np.full((2, 2), 2**31 - 1, np.int32), np.array([-1, 5])
            found = choose(logits, positions, np.array([0, 2], np.float32), seeds, Guarded(at_end))
            assert ((found >= 0) & (found < 700)).all()

    check_in_child(work)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logits": None}, "null"), ({"seeds": None}, "null"), ({"choices": None}, "null"),
        ({"tokens": -1}, "extent"), ({"vocabulary": 0}, "extent"), ({"vocabulary": (1 << 24) + 1}, "extent"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_are_refused(fields: dict[str, Any], reason: str) -> None:
    memory = np.zeros(64, np.float32)
    names = "logits", "positions", "temperatures", "seeds", "choices"
    good = {**dict.fromkeys(names, memory), "sequences": 1, "tokens": 1, "vocabulary": 4}
    with pytest.raises(EngineError, match=reason):
        emulated_kernels().launch("choose", **{**good, **fields})
    emulated_kernels().launch("choose", **{**good, "sequences": 0, "logits": None})


def commit(arguments: dict[str, np.ndarray], place: Place = lambda array: array) -> tuple[np.ndarray, ...]:
    """What the kernel leaves of cache, waiting states, states and result."""
    placed = {}
    for name, array in arguments.items():
        placed[name] = place(aligned(array.shape, array.dtype.type))
        placed[name][...] = array
    planes, slots, heads, capacity, _ = placed["cache"].shape
    outlook, (sequences, tokens) = placed["log_weights"].shape[1], placed["parents"].shape
    emulated_kernels().launch(
        "commit", **placed, sequences=sequences, tokens=tokens, planes=planes, slots=slots, kv_heads=heads,
        longest=placed["result"].shape[1] // 2 - 1 - tokens - outlook, outlook=outlook, capacity=capacity,
        waiting_rows=placed["waiting"].shape[1], row_bytes=placed["cache"].strides[3],
        state_bytes=placed["waiting"].strides[1],
    )  # fmt: skip
    return tuple(placed[name] for name in ("cache", "waiting", "states", "result"))


@pytest.mark.parametrize(("tokens", "longest"), [(1, 1), (2, 2), (33, 3), (200, 9), (40, 40)])
def test_commits_are_the_references(tokens: int, longest: int) -> None:
    """The path of the host's walk, its rows and states moved, nothing beside them, and the report."""
    rng = np.random.default_rng(tokens)
    for _ in range(20):
        given = reference.random_commit(rng, tokens, longest)
        given["counts"][0] = rng.integers(-1, tokens + 3)
        for found, expected in zip(commit(given), reference.commit(**given), strict=True):
            np.testing.assert_array_equal(found, expected)
        found, parents, ids, choices = found[1], *(given[x][1] for x in ("parents", "token_ids", "choices"))
        size = given["counts"][1]
        host = _native.walk(parents[:size], ids[1:size], choices[:size])[:longest]
        assert found[1] == len(host) and found[2 + longest :][: len(host)].tolist() == host.tolist()


def compact(
    cache: np.ndarray, slot_ids: ArrayLike, past_len: ArrayLike, keep: ArrayLike, keep_count: ArrayLike,
    place: Place = lambda array: array,
) -> None:  # fmt: skip
    planes, slots, heads, capacity, _ = cache.shape
    given = {"slot_ids": slot_ids, "past_len": past_len, "keep": keep, "keep_count": keep_count}
    arrays = {name: place(np.asarray(a, np.int32)) for name, a in given.items()}
    emulated_kernels().launch(
        "compact", cache=cache, **arrays, sequences=len(arrays["keep"]), planes=planes, slots=slots, kv_heads=heads,
        capacity=capacity, max_keep=arrays["keep"].shape[1], row_bytes=cache.strides[3],
    )  # fmt: skip


def new_cache(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    cache = aligned(shape, np.uint16)
    cache[...] = np.random.default_rng(seed).integers(0, 2**16, shape)
    return cache


def check_compaction(cache: np.ndarray, slot_ids: ArrayLike, past_len: ArrayLike, keeps: list[list[int]]) -> None:
    """The kernel moves the same bytes, and no others, as the reference."""
    slots, past = np.asarray(slot_ids, np.int32), np.asarray(past_len, np.int32)
    counts = np.array([len(keep) for keep in keeps], np.int32)
    padded = np.array([[*keep, *[-1] * (max(counts.max(), 1) - len(keep))] for keep in keeps], np.int32)
    expected = reference.compact(cache, slots, past, padded, counts)
    compact(cache, slots, past, padded, counts)
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("window", [1, 5, 7])
def test_compaction_of_every_kept_set_of_a_window(window: int) -> None:
    for size in range(window + 1):
        for keep in itertools.combinations(range(window), size):
            check_compaction(new_cache((1, 1, 1, 12, 8), window), [0], [3], [list(keep)])


@pytest.mark.parametrize("seed", range(10))
def test_compaction_of_random_sets(seed: int) -> None:
    rng, capacity = np.random.default_rng(seed), 80
    past_len = rng.integers(0, capacity, 2)
    keeps = [np.sort(rng.permutation(capacity - past)[: rng.integers(0, 40)]).tolist() for past in past_len]
    cache = new_cache((2, 3, 5, capacity, int(rng.choice([8, 64, 128]))), seed)
    check_compaction(cache, rng.permutation(3)[:2], past_len, keeps)


@pytest.mark.parametrize(("keep", "moved"), [([1, 3, 2, 5], [1, 3]), ([-1, 4], []), ([3, 2**31 - 1, 4], [3])])
def test_compaction_stops_at_the_first_entry_that_does_not_rise(keep: list[int], moved: list[int]) -> None:
    cache = new_cache((1, 1, 2, 12, 8))
    expected = cache.copy()
    expected[:, :, :, 3 : 3 + len(moved)] = cache[:, :, :, [3 + row for row in moved]]
    compact(cache, [0], [3], [keep], [len(keep)])
    np.testing.assert_array_equal(cache, expected)


def _run_garbage(at_end: bool) -> None:
    rng = np.random.default_rng(3)
    bad = [-(2**31), -1, 2**31 - 1, 10**6]
    for _ in range(20):
        guard = Guarded(at_end)

        def garbage(*shape: int, guard: Guarded = guard) -> np.ndarray:
            values = np.where(rng.random(shape) < 0.5, rng.choice(bad, shape), rng.integers(0, 30, shape))
            return guard(values.astype(np.int32))

        cache = guard(new_cache((2, 2, 2, 24, 8)))
        compact(cache, garbage(2), garbage(2), garbage(2, 9), garbage(2), guard)
        given = reference.random_commit(rng, 33, 9)
        numbers = {name: garbage(*a.shape) for name, a in given.items() if a.dtype == np.int32 and name != "result"}
        commit({**given, **numbers}, guard)
        parents, mask = garbage(2, 40), guard(np.zeros((2, 40, 2), np.int32))
        emulated_kernels().launch("packed_mask", parents=parents, mask=mask, sequences=2, tokens=40, mask_words=2)
        log_probs = rng.choice([np.nan, np.inf, -np.inf, 0.0, -1.0, 3e38], (2, 4, 5)).astype(np.float32)
        out = build(log_probs, garbage(2, 4, 5), 33, garbage(2), garbage(2), 70, guard)
        for parents, count in zip(out["parents"], out["counts"], strict=True):
            assert 1 <= count <= 33
            none = np.zeros(count, np.int32)
            _native.walk(parents[:count].copy(), none[1:], none)  # refuses what is not a tree


@pytest.mark.parametrize("at_end", [True, False])
def test_garbage_stays_in_bounds_and_builds_trees(at_end: bool) -> None:
    emulated_kernels()
    check_in_child(_run_garbage, at_end)


@pytest.mark.parametrize(
    ("call", "fields", "text"),
    [
        ("build_tree", {"sequences": 1, "tokens": 2 + MAX_DEVICE_BUDGET}, "extent"),
        ("build_tree", {"sequences": 1, "tokens": 1, "outlook": 1 + MAX_DEVICE_BUDGET}, "extent"),
        ("build_tree", {"sequences": 1, "tokens": 5, "positions_l": 2, "candidates_k": 2}, "pointer"),
        ("packed_mask", {"sequences": 1, "tokens": 33, "mask_words": 1}, "extent"),
        ("commit", {"sequences": 1, "tokens": 3, "longest": 1}, "extent"),
        ("compact", {"sequences": 1, "planes": 1, "slots": 1, "kv_heads": 1, "capacity": 1, "row_bytes": 20}, "extent"),
    ],
)
def test_launchers_refuse(call: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineError, match=text):
        emulated_kernels().launch(call, **fields)
