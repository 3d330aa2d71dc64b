"""Gated delta nets over trees and their commits: the CUDA source, run on the CPU, against the recurrence."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kernel_reference as reference
import ml_dtypes
import numpy as np
import pytest
from delta_truth import path_to, random_parents
from plugin_libraries import Guarded, check_in_child, emulated_kernels

from ddtree_trt.errors import EngineError

Place = Callable[[np.ndarray], np.ndarray]
LAYERS, SLOTS, PAST = 2, 3, 3


@dataclass
class Layers:
    """Both layers' states and what a pass keeps of its rows. Trees go through the second layer."""

    rng: np.random.Generator
    rows: int
    heads: dict[str, int]
    place: Place = lambda array: array
    kept: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        h, rng = self.heads, self.rng
        self.channels = 2 * h["key_heads"] * h["key_dim"] + h["value_heads"] * h["value_dim"]
        states = rng.standard_normal((LAYERS, SLOTS, h["value_heads"], h["key_dim"], h["value_dim"]))
        past = rng.standard_normal((LAYERS, SLOTS, PAST, self.channels))
        self.states, self.past = (self.place(x.astype(np.float32)) for x in (states, past))
        of_row = {"keys": (h["key_heads"], h["key_dim"]), "updates": (h["value_heads"], h["value_dim"])}
        self.kept = {
            name: self.place(np.full((LAYERS, self.rows, *shape), np.nan, np.float32)) for name, shape in of_row.items()
        }
        self.kept["decays"] = self.place(np.full((LAYERS, self.rows, h["value_heads"]), np.nan))

    def draw(self, *shape: int) -> list[np.ndarray]:
        """Of rows [N, T]: queries, keys and values, log decays and steps."""
        heads = *shape, self.heads["value_heads"]
        mixed = self.rng.standard_normal((*shape, self.channels))
        return [x.astype(np.float32) for x in (mixed, -self.rng.exponential(0.3, heads), self.rng.uniform(0, 1, heads))]

    def run(
        self, parents: np.ndarray, slots: np.ndarray, drawn: list[np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[Any]]:
        """Results [N, T, Hv, Dv] of a pass, and by sequence what the recurrence says."""
        (count, tokens), h = parents.shape, self.heads
        mixed, log_decays, steps = drawn or self.draw(count, tokens)
        given = [self.place(x) for x in (mixed, log_decays, steps, parents.astype(np.int32), slots.astype(np.int32))]
        mixed, log_decays, steps, parents, slots = given
        out = self.place(np.full((count, tokens, h["value_heads"], h["value_dim"]), np.nan, np.float32))
        emulated_kernels().launch(
            "delta_tree", mixed=mixed, log_decays=log_decays, steps=steps, parents=parents, states=self.states[1],
            slot_ids=slots, out=out, **{name: array[1] for name, array in self.kept.items()}, sequences=count,
            tokens=tokens, slots=SLOTS, **h,
        )  # fmt: skip
        heads = h["key_heads"], h["key_dim"]
        wanted = [
            reference.delta_tree(*each[:4], self.states[1, np.clip(each[4], 0, SLOTS - 1)], heads)
            for each in zip(mixed, log_decays, steps, parents, slots, strict=True)
        ]
        return out, wanted

    def commit(self, slot: int, inputs: np.ndarray, path: np.ndarray | None, first: int, size: int, kind: int) -> None:
        """`kind`: of the inputs, an element type or −1 for float32."""
        inputs, path = self.place(inputs), None if path is None else self.place(path.astype(np.int32))
        arrays = {"states": self.states, "past": self.past, "inputs": inputs, "path": path, **self.kept}
        emulated_kernels().launch(
            "delta_commit", **arrays, first=first, path_rows=size, slot=slot, slots=SLOTS, layers=LAYERS,
            rows=self.rows, past_rows=PAST, single=kind < 0, type=max(kind, 0), **self.heads,
        )  # fmt: skip


HEADS = [(1, 1, 16, 32), (2, 4, 128, 128), (2, 6, 48, 40), (3, 3, 100, 7)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 5, 64, 257])
def test_trees_and_their_commits(heads: tuple[int, ...], tokens: int) -> None:
    """Sequences side by side; a path of one is committed, its rows named or in a row, and the other slots stay."""
    rng = np.random.default_rng([tokens, *heads])
    count = 2 if tokens < 257 else 1
    names = dict(zip(("key_heads", "value_heads", "key_dim", "value_dim"), heads, strict=True))
    layers = Layers(rng, count * tokens + 3, names)
    parents = np.array([random_parents(rng, tokens) for _ in range(count)])
    slots = rng.permutation(SLOTS)[:count]
    for turn in range(2):
        out, wanted = layers.run(parents, slots)
        for found, (expected, _) in zip(out, wanted, strict=True):
            assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max() * heads[2] ** 0.5
        for array in layers.kept.values():  # the first layer's are those of no pass
            array[0] = array[1]
        n = int(rng.integers(count))
        nodes = path_to(parents[n].tolist(), int(rng.integers(tokens)))
        first = n * tokens
        path = None if turn else np.array(nodes) + first
        if turn:  # a root and its first child, where there is one
            nodes = nodes[:1] if tokens == 1 else [0, 1]
        kind = int(rng.integers(-1, 2))
        inputs = rng.standard_normal((LAYERS, layers.rows, layers.channels)).astype(
            (np.float32, ml_dtypes.bfloat16, np.float16)[kind + 1]
        )
        states, past = layers.states.copy(), layers.past.copy()
        layers.commit(slots[n], inputs, path, first, len(nodes), kind)
        expected = wanted[n][1][nodes[-1]]
        assert np.abs(layers.states[1, slots[n]] - expected).max() < 3e-6 * np.abs(expected).max()
        rows = np.concatenate([past[:, slots[n]], inputs[:, first + np.array(nodes)].astype(np.float32)], 1)
        np.testing.assert_array_equal(layers.past[:, slots[n]], rows[:, -PAST:])
        others = [slot for slot in range(SLOTS) if slot != slots[n]]
        np.testing.assert_array_equal(layers.states[:, others], states[:, others])
        np.testing.assert_array_equal(layers.past[:, others], past[:, others])


def test_a_node_has_the_bits_of_its_path() -> None:
    """Whatever else is in the tree, and wherever in it the path lies."""
    names = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    layers = Layers(np.random.default_rng(0), 60, names)
    parents, drawn = random_parents(layers.rng, 60), layers.draw(1, 60)
    whole, _ = layers.run(np.array([parents]), np.array([1]), drawn)
    path = path_to(parents, 59)
    chain = np.arange(-1, len(path) - 1)[None]
    alone, _ = layers.run(chain, np.array([1]), [np.ascontiguousarray(each[:, path]) for each in drawn])
    np.testing.assert_array_equal(alone[0], whole[0, path])


@pytest.mark.parametrize("at_end", [True, False])
def test_garbage_stays_in_bounds(at_end: bool) -> None:
    """Parents, slots and rows of any value; arrays between pages that nobody may touch."""

    def work() -> None:
        rng = np.random.default_rng(at_end)
        place = Guarded(at_end)
        for _ in range(6):
            names = {"key_heads": 1, "value_heads": 2, "key_dim": 20, "value_dim": 36}
            layers = Layers(rng, 18, names, place)
            wild = rng.integers(-(2**31), 2**31 - 1, (2, 9))
            parents = np.where(rng.uniform(size=wild.shape) < 0.5, wild, rng.integers(-1, 9, wild.shape))
            out, wanted = layers.run(parents, rng.integers(-5, 9, 2))
            for found, (expected, _) in zip(out, wanted, strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-4)
            inputs = rng.standard_normal((LAYERS, 18, layers.channels)).astype(np.float32)
            layers.commit(2, inputs, rng.integers(-(2**31), 2**31 - 1, 5), 0, 5, -1)
            layers.commit(0, inputs, None, 15, 9, -1)

    check_in_child(work)


def test_what_does_not_fit_is_refused() -> None:
    one = np.zeros(1 << 14, np.float64)
    heads = {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16}
    names = "mixed log_decays steps parents states slot_ids out keys updates decays"
    tree = {**dict.fromkeys(names.split(), one), "sequences": 1, "tokens": 3, "slots": 1, **heads}
    names = "states past keys updates decays inputs"
    path = {**dict.fromkeys(names.split(), one), **heads, "past_rows": 3}
    path |= dict.fromkeys(("path_rows", "slots", "layers", "rows", "single"), 1)
    launch = emulated_kernels().launch
    for call, good, wrong in (
        ("delta_tree", tree, {"tokens": 513, "key_dim": 129}),
        ("delta_tree", tree, {"value_heads": 0, "slots": 0, "sequences": -1, "mixed": None, "decays": None}),
        ("delta_commit", path, {"slot": 1, "rows": 0, "past_rows": -1, "key_heads": 3, "inputs": None, "past": None}),
    ):
        for name, value in wrong.items():
            message = "null" if value is None else "no kernel" if name in ("tokens", "key_dim") else "extent"
            with pytest.raises(EngineError, match=message if value is not None else "pointer"):
                launch(call, **{**good, name: value})
        launch(call, **good)
    launch("delta_tree", **{**tree, "tokens": 0, "mixed": None})
    launch("delta_commit", **{**path, "path_rows": 0, "states": None})
