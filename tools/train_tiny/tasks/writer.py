"""The state in which a task family writes one conversation, and the record it returns."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import words

Item = TypeVar("Item")
USUAL = 0.75
"""How often an answer takes its usual wording."""


@dataclass(frozen=True)
class Task:
    """A conversation of (request, answer) turns and how to judge the answer of the last one.

    check holds "expected" and possibly "facts" (math, chat), or "name" and "tests" (code).
    """

    domain: str
    family: str
    turns: tuple[tuple[str, str], ...]
    check: dict[str, Any] = field(default_factory=dict)


Family = Callable[["Writer"], tuple[list[tuple[str, str]], dict[str, Any]]]


class Writer:
    """Random choices of one conversation.

    `ask` chooses the wording of a request and `number` its figures: both are recorded, since held-out prompts use
    recorded combinations that training text avoids. `say` chooses the wording of an answer, which stays free within
    limits: the genuine ambiguity that a tree of drafts covers and a chain does not, beside a usual wording that keeps
    greedy answers steady.
    """

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self.numbers: list[object] = []
        self.wordings: list[int] = []
        self._used: set[str] = set()
        self._made_up: list[str] = []
        self._towns: list[str] = []

    def ask(self, *options: Item) -> Item:
        index = self.rng.randrange(len(options))
        self.wordings.append(index)
        return options[index]

    def say(self, *options: Item) -> Item:
        """The first, usual wording three times in four."""
        return options[0] if self.chance(USUAL) else self.rng.choice(options[1:])

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        return self.note(self.rng.randint(low, high))

    def note(self, value: Item) -> Item:
        """Make `value` part of the combination that decides between training and held out."""
        self.numbers.append(value)
        return value

    def one(self, pool: Sequence[str]) -> str:
        """A member of pool not used in this conversation yet."""
        return self._unused(lambda: self.rng.choice(pool))

    def name(self) -> str:
        alike = self.rng.choice(self._made_up) if self._made_up and self.chance(0.25) else None
        name = self._unused(lambda: self._side(lambda: words.make_name(self.rng, alike)))
        if name not in words.REAL_NAMES:
            self._made_up.append(name)
        return name

    def town(self) -> str:
        alike = self.rng.choice(self._towns) if self._towns and self.chance(0.25) else None
        town = self._unused(lambda: self._side(lambda: words.make_town(self.rng, alike)))
        self._towns.append(town)
        return town

    def clock(self) -> str:
        return f"{self.number(6, 21)}:{self.rng.choice(('00', '10', '15', '20', '30', '40', '45', '50'))}"

    def _side(self, make: Callable[[], str]) -> str:
        """A word from this conversation's side of the split (fallback: look-alikes may run out on the small side)."""
        for _ in range(200):
            word = make()
            if words.is_held_out(word) == self.held_out:
                return word
        while words.is_held_out(word := words.make_name(self.rng, None)) != self.held_out:
            pass
        return word

    def _unused(self, make: Callable[[], str]) -> str:
        for _ in range(50):
            word = make()
            if word not in self._used:
                break
        self._used.add(word)
        return word


def write_task(rng: random.Random, domain: str, families: Sequence[Family], held_out: bool) -> Task:
    """One conversation on the wanted side of the split.

    The digest of all numbers drawn, and that of all wordings drawn, decide: training text has neither on the held-out
    side, a held-out prompt has both. (A family may draw more than it then uses.) A family with only a few wordings may
    have none to spare: after some draws its held-out numbers and names are enough.
    """
    for draw in itertools.count():
        writer = Writer(rng, held_out)
        family = rng.choice(families)
        turns, check = family(writer)
        name = family.__name__
        numbers, wordings = (words.is_held_out((name, x)) for x in (writer.numbers, writer.wordings))
        if (numbers and (wordings or draw > 400)) if held_out else not (numbers or wordings):
            return Task(domain, name, tuple(turns), check)
    raise AssertionError("unreachable: the draws never end")
