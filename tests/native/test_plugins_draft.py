"""A draft's candidates: the CUDA source, run on the CPU, against the NumPy reference."""

from collections.abc import Callable
from typing import Any

import kernel_reference as reference
import numpy as np
import pytest
from plugin_libraries import Guarded, check_in_child, emulated_kernels

from ddtree_trt.errors import EngineError

MOST = 4096  # candidates: kMaxCandidates of include/ddtree/draft.h
INF = float("inf")


def top(
    logits: np.ndarray, k: int, *, normalised: bool = True, place: Callable[[np.ndarray], np.ndarray] = np.array
) -> tuple[np.ndarray, np.ndarray]:
    logits = place(logits)
    best, ids = place(np.full((len(logits), k), np.nan, np.float32)), place(np.full((len(logits), k), -7, np.int32))
    emulated_kernels().launch(
        "draft_top", logits=logits, best=best, ids=ids, rows=len(logits), vocabulary=logits.shape[1], candidates_k=k,
        normalised=normalised,
    )  # fmt: skip
    return best, ids


def check(logits: np.ndarray, *ks: int) -> None:
    for k in ks:
        for normalised in (True, False):
            best, ids = top(logits, k, normalised=normalised)
            expected, wanted = reference.draft_top(logits, k, normalised=normalised)
            np.testing.assert_array_equal(ids, wanted)
            if normalised:  # the sum's logarithm is rounded to float32
                largest = np.abs(logits[np.isfinite(logits)]).max(initial=0)
                np.testing.assert_allclose(best, expected, rtol=1e-6, atol=4e-6 + 2.0**-23 * largest)
            else:
                np.testing.assert_array_equal(best, expected.astype(np.float32))


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Logits about as spread as a network's."""
    return (3 * rng.standard_normal(shape) - 20).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 31, 128, 129, 49152])
def test_candidates_are_the_reference(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    sizes = {1, 2, 3, 16, 63, 64, 65, 256, vocabulary - 1, vocabulary}
    check(random(rng, 3, vocabulary), *(k for k in sizes if 1 <= k <= min(vocabulary, MOST)))


@pytest.mark.parametrize("k", [1, 64, MOST])
def test_candidates_of_a_whole_vocabulary(k: int) -> None:
    """151,936 tokens in 1,187 tiles, more or fewer than the candidates; and as many as make tiles of two strips."""
    rng = np.random.default_rng(k)
    for vocabulary in (151_936, 2048 * 128 + 1):
        check(random(rng, 1, vocabulary), k)


@pytest.mark.parametrize("k", [7, 300])
def test_equal_logits_are_in_the_order_of_their_ids(k: int) -> None:
    """Rows of few values, of one value, and of zeros of both signs: whole tiles are equal, and only ids decide."""
    rng = np.random.default_rng(k)
    few = rng.choice(np.array([-3.0, -1.5, 0.0, 2.0], np.float32), (2, 9000), p=[0.4, 0.3, 0.29, 0.01])
    zeros = rng.choice(np.array([-0.0, 0.0], np.float32), (1, 9000))
    check(np.concatenate([few, zeros, np.full_like(zeros, 5)]), k)


def test_logits_of_any_size() -> None:
    """No exponential overflows, and none is lost that counts."""
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1e3, 3e38):
        check((scale * rng.uniform(-1, 1, (2, 3000))).astype(np.float32), 1, 20)


@pytest.mark.parametrize("k", [1, 5, 400])
def test_what_is_no_number(k: int) -> None:
    """-inf is a candidate like others, NaN is in its place; NaN, +inf and nothing but -inf make a row's sum NaN."""
    rng = np.random.default_rng(k)
    logits = random(rng, 6, 1000)
    logits[0, rng.random(1000) < 0.9] = -INF
    logits[1, 3:] = -INF
    logits[2] = -INF
    logits[3, 77] = np.nan
    logits[4, 500:502] = INF
    logits[5] = np.nan
    check(logits, k)
    best, _ = top(logits, k)
    assert np.isnan(best[2:]).all() and not np.isnan(best[:2]).any()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random(np.random.default_rng(0), 5, 3000)
    together = top(logits, 50)
    for n, row in enumerate(logits):
        for found, expected in zip(top(row[None], 50), together, strict=True):
            np.testing.assert_array_equal(found[0], expected[n])


def _run_guarded(at_end: bool) -> None:
    rng = np.random.default_rng(0)
    for vocabulary, k in ((1, 1), (127, 127), (1000, 3), (5001, 64)):
        top(random(rng, 2, vocabulary), k, place=Guarded(at_end))


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_read_or_written(at_end: bool) -> None:
    emulated_kernels()
    check_in_child(_run_guarded, at_end)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"candidates_k": 0}, "extent"),
        ({"candidates_k": MOST + 1, "vocabulary": 10_000}, "extent"),
        ({"logits": None}, "pointer"),
        ({"ids": None}, "pointer"),
    ],
)
def test_the_launcher_refuses(fields: dict[str, Any], text: str) -> None:
    logits, best, ids = np.zeros((1, 10), np.float32), np.zeros((1, 10), np.float32), np.zeros((1, 10), np.int32)
    good = {"logits": logits, "best": best, "ids": ids, "rows": 1, "vocabulary": 10, "candidates_k": 10}
    with pytest.raises(EngineError, match=text):
        emulated_kernels().launch("draft_top", **{**good, **fields})
    emulated_kernels().launch("draft_top", **good)
    emulated_kernels().launch("draft_top", **{**good, "rows": 0, "logits": None})
