"""Which work on a slot came last, so that rounds launched ahead of the host know whether they still count."""

from __future__ import annotations

from collections.abc import Iterable


class SlotClaims:
    """A number for every piece of work on a slot; a later claim of the slot ends an earlier one."""

    def __init__(self, slots: int) -> None:
        self._holders = [0] * slots
        self._latest = 0

    def take(self, slots: Iterable[int]) -> int:
        """Claim these slots: the claim's number."""
        self._latest += 1
        for slot in slots:
            self._holders[slot] = self._latest
        return self._latest

    def holds(self, claim: int, slots: Iterable[int]) -> bool:
        """Whether none of these slots was claimed after `claim`."""
        return all(self._holders[slot] == claim for slot in slots)
