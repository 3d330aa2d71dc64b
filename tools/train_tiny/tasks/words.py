"""Word lists of the corpus and its made-up names, each with the rule that keeps some of them for evaluation only."""

import random
from hashlib import blake2b

HELD_OUT_PART = 8
"""One in this many names, number combinations and request wordings never occurs in training text."""

REAL_NAMES = (
    "Mia Tom Anna Ben Clara David Ella Frank Grace Henry Iris Jack Kate Leo Maya Noah Olga Paul Quinn Rosa Sam Tina "
    "Uma Victor Wendy Yusuf Zoe Amir Bella Carl Dina Emil Fay Gus Hana Ivan Julia Karim Lena Milo Nina Oscar Petra "
    "Ravi Sara Theo Vera Will Yara Alice Bruno Cleo Dan Eva Felix Gina Hugo Ida Jonas Kim Lars Mona Nico Otto Pia "
    "Rita Simon Tara Wanda Adam Beth Cora Erik Finn Gail Hope Jane Kurt Liam Mark Nora Omar Pam Rose Sean Tess"
).split()
ONSETS = "b d f g h j k l m n p r s t v w y z sh th br dr kr tr st fl gl".split()
VOWELS = "a e i o u a e i o ei au ia".split()
CODAS = ["", "", "", "", "n", "l", "r", "s", "k", "m"]
NAME_ENDS = ["", "", "", "n", "l", "s", "r", "k", "m", "th", "na", "ra", "lo", "mi"]
TOWN_ENDS = "ville ton burg ford dale port field ham wick stad".split()

THINGS = (
    "apples pears books pens coins stamps marbles cards eggs cookies pencils stickers shells beads balls flowers cups "
    "plates candles keys buttons toys nuts plums lemons muffins badges stones ribbons tickets"
).split()
BOXES = "boxes bags baskets crates jars shelves trays packs drawers rows".split()
JOBS = "baker nurse teacher pilot farmer painter driver singer doctor writer cook tailor gardener judge plumber".split()
COLOURS = "red green blue yellow purple orange white black pink brown grey".split()
PETS = "cat dog parrot rabbit hamster goat horse turtle duck pony".split()
GOODS = "tea lamps bread chairs soap hats shoes maps honey paint cheese clocks rugs bikes tools milk".split()
HOBBIES = "chess football painting cooking fishing reading tennis dancing sailing climbing singing knitting".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SMALL_NUMBERS = "zero one two three four five six seven".split()


def digest(value: object) -> int:
    """A hash that is the same in every process."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=4).digest(), "little")


def is_held_out(value: object) -> bool:
    return digest(value) % HELD_OUT_PART == 0


def _syllables(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if i else "") for i in range(count)]


def _mutate(word: str, rng: random.Random) -> str:
    """One letter replaced by another of its kind: the names that are hardest to copy are those that look alike."""
    place = rng.randrange(len(word))
    letters = "aeiou" if word[place].lower() in "aeiou" else "bdfgklmnprstvz"
    changed = rng.choice([x for x in letters if x != word[place].lower()])
    return (word[:place] + changed + word[place + 1 :]).lower().capitalize()


def make_name(rng: random.Random, alike: str | None) -> str:
    """A common or a made-up first name; with `alike`, a made-up one that differs from it in a letter.

    Some are common names with letters changed: so that every piece of a word, also a single letter, is copied often.
    """
    if alike is not None:
        return _mutate(alike, rng)
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(REAL_NAMES)
    if kind < 0.5:
        changed = _mutate(rng.choice(REAL_NAMES), rng)
        return _mutate(changed, rng) if kind < 0.4 else changed
    return ("".join(_syllables(rng, 2)) + rng.choice(NAME_ENDS)).capitalize()


def make_town(rng: random.Random, alike: str | None) -> str:
    """A made-up town; with `alike`, one with another ending or another letter."""
    if alike is not None and rng.random() < 0.5:
        stem = next(alike[: -len(end)] for end in TOWN_ENDS if alike.endswith(end))
        return stem + rng.choice(TOWN_ENDS)
    stem = "".join(_syllables(rng, rng.choice((1, 2, 2))))
    return stem.capitalize() + rng.choice(TOWN_ENDS)


def pronoun(name: str) -> str:
    """The corpus decides by the last letter."""
    return "She" if name[-1] in "aeiy" else "He"
