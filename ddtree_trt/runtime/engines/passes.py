"""What the passes of engines share: counts of committed rows, trees of several slots as one pass of a fixed size,
logits that stay on a device, and the first passes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import Engine, VerifyRequest
from ddtree_trt.runtime.tree import token_chain


class SlotLengths:
    """The number of committed rows of each slot. The object does not own the rows' memory."""

    def __init__(self, slots: int, rows: int, states: Any = None) -> None:
        """`rows`: of each slot; `states` of a hybrid, which rows move: its slots' `snapshots`, and `restore`."""
        self.rows = rows
        self.states = states
        self._lengths = [0] * slots

    @property
    def slots(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Committed rows of each slot; `append` and `truncate` change them."""
        return self._lengths

    def check_room(self, slot: int, tokens: int) -> None:
        """Raises EngineError when `tokens` more rows do not fit: a pass would silently write behind the slot."""
        length = self._lengths[slot]
        if length + tokens > self.rows:
            raise EngineError(f"slot {slot} holds {length} of {self.rows} cache rows, {tokens} more do not fit")

    def append(self, slot: int, tokens: int) -> None:
        """Count the rows that a pass has written behind the committed ones as committed."""
        self.check_room(slot, tokens)
        self._lengths[slot] += tokens

    def restorable(self, slot: int, length: int) -> int:
        """The most of the first `length` rows that `truncate` can keep: all of them, unless they move a state."""
        if self.states is None or length >= self._lengths[slot]:
            return length
        return self.states.snapshots.restorable(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` rows, or as many as are restorable. Raises EngineError for a slot with fewer."""
        held = self._lengths[slot]
        if not 0 <= length <= held:
            raise EngineError(f"slot {slot} holds {held} tokens, cannot keep the first {length}")
        self._lengths[slot] = kept = self.restorable(slot, length)
        if self.states is not None and kept < held:
            self.states.restore(slot, kept)


State = TypeVar("State")


class Snapshots(Generic[State]):
    """States that the slots of a hybrid keep to come back to, by length: every so many tokens, and before the last
    token of the prompt that ended last, which a later one like it computes again."""

    def __init__(self, slots: int, every: int) -> None:
        """`every`: tokens between them; 0: the prompt's only."""
        self._every = every
        self._kept: list[dict[int, State]] = [{} for _ in range(slots)]

    def stops(self, slot: int, length: int, end: int, *, prompt_ends: bool) -> list[int]:
        """The lengths, rising, at which a slot that grows from `length` to `end` has to `keep` its state, if it has
        none. `prompt_ends`: with these tokens; an earlier prompt's state is forgotten."""
        every, kept = self._every, self._kept[slot]
        stops = {*range(length - length % every + every, end + 1, every)} if every else set()
        if prompt_ends:
            for old in [n for n in kept if not every or n % every]:
                del kept[old]
            stops |= {end - 1} - {0}
        return sorted(stops - kept.keys())

    def keep(self, slot: int, length: int, state: State) -> None:
        self._kept[slot][length] = state

    def restorable(self, slot: int, length: int) -> int:
        """The longest kept state's length up to that one; 0 for none."""
        return max((n for n in self._kept[slot] if n <= length), default=0)

    def kept(self, slot: int) -> Collection[State]:
        return self._kept[slot].values()

    def back_to(self, slot: int, length: int) -> State | None:
        """The state kept at a length, None for 0; later ones are forgotten."""
        kept = self._kept[slot] = {n: state for n, state in self._kept[slot].items() if n <= length}
        return kept.get(length)


Row = NDArray[np.float32]


class LazyRows:
    """`base.Rows` in a device's memory, until the next target pass: a row is copied to the host when it is read."""

    def __init__(self, rows: int, width: int, fetch: Callable[[int, int, slice], Row]) -> None:
        """`fetch(start, stop, columns)` returns a copy of those columns of the rows, float32 [stop − start, …]. Where
        these are not all of the `width` there is one of them, of one row."""
        self._rows = rows
        self._width = width
        self._fetch = fetch

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, place: int | tuple[int, int], /) -> Any:
        row, column = place if isinstance(place, tuple) else (place, None)
        index = row + self._rows if row < 0 else row
        if not 0 <= index < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        if column is not None:
            return float(self._fetch(index, index + 1, slice(column, column + 1))[0, 0])
        return self._fetch(index, index + 1, slice(None))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        rows = self._fetch(0, self._rows, slice(None)) if self._rows else np.empty((0, self._width), np.float32)
        return rows.astype(dtype or np.float32, copy=False)


Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PaddedTrees:
    """N trees of T rows each. A padding row repeats its root's token and position and sees only itself; its keys and
    values lie behind the tree's rows in the cache and are never committed."""

    slot_ids: Int32  # [N]
    past_len: Int32  # [N]
    token_ids: Int32  # [N, T]
    positions: Int32  # [N, T]
    tree_mask: Int32  # [N, T, W]: bit j % 32 of word j / 32 of row i is set where i sees node j
    parents: Int32  # [N, T]; −1 at roots and padding


def write_mask(mask: NDArray[np.uint32], parents: Int32) -> None:
    """Ancestor-or-self bits of parents [n] into mask [T, W], all zeros; the rows from n on are padding."""
    size = len(parents)
    bits = _native.packed_mask(parents)
    mask[:size, : bits.shape[1]] = bits.view(np.uint32)
    padding = np.arange(size, len(mask), dtype=np.uint32)
    mask[padding, padding // 32] = np.uint32(1) << padding % np.uint32(32)


def mask_words(tokens: int) -> int:
    """W: the 32-bit words that hold one row of a mask over `tokens` new rows."""
    return -(-tokens // 32)


def pad_trees(requests: Sequence[VerifyRequest], lengths: Sequence[int], tokens: int, words: int) -> PaddedTrees:
    """The requests' trees padded to T = `tokens`, behind `lengths`[slot] committed rows; W = `words` per mask row."""
    count = len(requests)
    slots = np.array([r.slot for r in requests], np.int32)
    past = np.array([lengths[r.slot] for r in requests], np.int32)
    token_ids, positions = np.empty((count, tokens), np.int32), np.empty((count, tokens), np.int32)
    masks, parents = np.zeros((count, tokens, words), np.uint32), np.full((count, tokens), -1, np.int32)
    for n, request in enumerate(requests):
        tree, size = request.tree, len(request.tree)
        token_ids[n], positions[n] = tree.token_ids[0], past[n]
        token_ids[n, :size], positions[n, :size] = tree.token_ids, past[n] + tree.depths
        parents[n, :size] = tree.parents
        write_mask(masks[n], tree.parents)
    return PaddedTrees(slots, past, token_ids, positions, masks.view(np.int32), parents)


@contextmanager
def closed_on_failure(thing: Any) -> Iterator[None]:
    """Close an engine or a part of one where the block raises, since no object then owns it."""
    try:
        yield
    except BaseException:
        thing.close()
        raise


def make_single_passes(
    engine: Engine, sizes: Collection[int], drafts: Callable[[int], None] | None, progress: Progress, *, slots: int = 1
) -> None:
    """In each of the first `slots` slots, which are empty, verify trees of `sizes` tokens, the largest first, prefill
    a prompt's longest chunk, and call `drafts` with the slot, if it is given. `progress` counts the trees."""
    limits = engine.manifest.limits
    chunk = np.zeros(min(limits.prefill_chunk, limits.max_seq_len - 1), np.int64)
    passes = [(slot, tokens) for slot in range(slots) for tokens in sorted(sizes, reverse=True)]
    for done, (slot, tokens) in enumerate(passes, 1):
        engine.verify([VerifyRequest(slot, token_chain(np.zeros(tokens, np.int64)))])
        progress("warm up", done, len(passes))
    for slot in range(slots):
        engine.prefill(slot, chunk, rows="last", taps=drafts is not None)
        if drafts is not None:
            drafts(slot)
        engine.truncate(slot, 0)
