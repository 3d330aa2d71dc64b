"""What native attention asks of the TensorRT engine: neighbouring slots, in-place caches, commits by a plan."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_pair
from fake_trt_engine import FORMS, LIMITS, Lowerings, Machine, build_trt_engine
from numerics import Follower, Truth, path_to, random_tree
from numpy.typing import NDArray

from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import CacheShape
from ddtree_trt.errors import EngineError
from ddtree_trt.models.families import QWEN3_5
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine


@pytest.fixture(scope="module")
def lowerings(small_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Lowerings:
    return Lowerings.packaged(tmp_path_factory.mktemp("lowered"), small_engine, FORMS["native"])


def committed(engine: TrtEngine, machine: Machine, slot: int) -> list[NDArray[np.uint8]]:
    """Copies of a slot's committed rows in both caches, [planes, Hkv, rows, row bytes] each."""
    manifest, found = engine.manifest, []
    parts = (
        (buffers.TARGET_KV, manifest.target_dims, engine.length(slot)),
        (buffers.DRAFTER_KV, manifest.drafter_dims, engine.drafter.cache.lengths[slot]),  # type: ignore[attr-defined]
    )
    engine.synchronize()
    for name, dims, rows in parts:
        shape = CacheShape.of(dims, engine.limits, 4)
        memory = machine.cuda.device.view(engine._loaded.addresses[name], shape.total_bytes)
        planes = memory.reshape(shape.planes, shape.stored_slots, shape.kv_heads, shape.rows, shape.row_bytes)
        found.append(planes[:, slot, :, :rows].copy())
    return found


def test_an_idle_slot_is_left_as_it_is_though_it_is_full(machine: Machine, engine: TrtEngine) -> None:
    """Slot 1 between two that decode holds as many tokens as a slot can, then is empty."""
    rng = np.random.default_rng(0)
    full = rng.integers(5, 2048, LIMITS.max_seq_len)
    for start in range(0, len(full), LIMITS.prefill_chunk):
        engine.prefill(1, full[start : start + LIMITS.prefill_chunk], rows="none", taps=True)
    for slot in (0, 2):
        engine.prefill(slot, rng.integers(5, 2048, 20), rows="none", taps=True)

    def round_of_others() -> None:
        engine.draft([DraftRequest(slot, 7, 5, 4) for slot in (0, 2)])
        trees = {slot: random_tree(rng, size, 2048) for slot, size in ((0, 41), (2, 7))}
        engine.verify([VerifyRequest(slot, tree) for slot, tree in trees.items()])
        for slot, tree in trees.items():
            engine.commit(slot, path_to(tree, 6), taps=True)

    before = committed(engine, machine, 1)
    assert before[0].shape[2] == LIMITS.max_seq_len and before[1].shape[2] > LIMITS.max_seq_len - 16
    for _ in range(3):
        round_of_others()
    for kept, found in zip(before, committed(engine, machine, 1), strict=True):
        np.testing.assert_array_equal(kept, found)
    assert engine.length(1) == LIMITS.max_seq_len
    with pytest.raises(EngineError, match="slot 1 was not in the last target pass"):
        engine.commit(1, np.zeros(1, np.int32), taps=True)
    engine.truncate(1, 0)
    round_of_others()
    assert engine.length(1) == engine.draftable(1, 99) == 0


def test_a_hybrid_comes_back_to_the_states_it_kept(tmp_path: Path) -> None:
    """Of two slots, at every 8th token and before a prompt's last: what was committed behind leaves no trace."""
    target, drafter = make_pair(tmp_path, family=QWEN3_5, num_layers=4, max_positions=512)
    options: dict[str, Any] = {"max_seq_len": 319, "max_tree_budget": 40, "max_batch": 2, "snapshot_every": 8}
    engine = build_trt_engine(target, drafter, tmp_path / "engine", form=FORMS["native"], **options)
    truth, rng = Truth(target, engine.manifest.drafting.tap_layers), np.random.default_rng(2)
    slots = [Follower(engine, slot, truth) for slot in range(2)]
    for slot, length in zip(slots, (30, 5), strict=True):
        slot.prefill(rng.integers(0, 96, length))
        slot.tokens += [7]
        engine.prefill(slot.slot, np.array([7]), rows="last", taps=True)
        slot._told.clear()
        for _ in range(4):
            slot.verify(tree := random_tree(rng, 40, 96))
            slot.commit(path_to(tree, int(tree.depths.argmax())))
    assert [engine.restorable(0, n) for n in (7, 8, 23, 29, 30, 31)] == [0, 8, 16, 24, 30, 30]
    assert [engine.restorable(1, n) for n in (4, 6, 8)] == [0, 5, 8]
    for length in (45, 30, 17, 3):
        for slot in slots:
            slot.truncate(min(length, len(slot.tokens)))
            slot.prefill(rng.integers(0, 96, 3))
            slot.verify(random_tree(rng, 9, 96))
    engine.close()
