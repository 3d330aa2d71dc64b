"""Prompts composed of templates and word lists, the same for the same seed."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_PLACE = re.compile(r"\{(\w+)\}")


def _read(name: str) -> dict[str, tuple[str, ...]]:
    """Entries by [section] of a file in texts/: one a line, or several between bars."""
    sections: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "texts" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            entries = sections.setdefault(header[1], [])
        elif line and not line.startswith("#"):
            entries += [entry.strip().replace("\\n", "\n") for entry in line.split("|") if entry.strip()]
    return {section: tuple(entries) for section, entries in sections.items()}


WORDS, TRAINING, HELD_OUT, HELD_OUT_WORDS = map(_read, ("words", "training", "held_out", "held_out_words"))
HELD_OUT_MARKS = HELD_OUT_WORDS["marks"]
"""A prompt that the target wrote itself and that holds one of these counts as of a held-out kind."""


def compose(template: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """The template with every {list} replaced by an entry of that list, whose own places are filled as well.

    A list that occurs twice in one template gives different entries. {{ and }} stand for braces.
    """
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        options = [entry for entry in words[match[1]] if entry not in used] or words[match[1]]
        entry = rng.choice(options)
        used.add(entry)
        return _PLACE.sub(fill, entry)

    guarded = template.replace("{{", "\0").replace("}}", "\1")
    return _PLACE.sub(fill, guarded).replace("{{", "{").replace("}}", "}").replace("\0", "{").replace("\1", "}")


def training_prompts(seed: int, part: int, count: int) -> list[tuple[str, str]]:
    """`count` pairs (kind, prompt) of training kinds; `part` numbers independent portions of one seed's stream."""
    rng, kinds, found = random.Random(f"training {seed} {part}"), list(TRAINING), []
    for kind in [rng.choice(kinds) for _ in range(count)]:
        prompt, form = compose(rng.choice(TRAINING[kind]), WORDS, rng), rng.random()
        if form < 0.06:  # as some people write: without capitals or full stops, or with a polite word
            prompt = prompt[0].lower() + prompt[1:].rstrip(".?!")
        elif form < 0.10 and prompt.endswith("."):
            prompt = prompt[:-1] + ", please."
        found.append((kind, prompt))
    return found


def held_out_prompts(seed: int, count: int) -> list[tuple[str, str]]:
    """`count` different pairs (kind, prompt) of held-out kinds, in turn; fewer where the kinds have no more to give."""
    rng, words = random.Random(f"held out {seed}"), {**WORDS, **HELD_OUT_WORDS}
    found: dict[str, str] = {}
    left = dict(HELD_OUT)
    while left:
        for kind in list(left):
            if len(found) == count:
                return [(kind, prompt) for prompt, kind in found.items()]
            drawn = (compose(rng.choice(HELD_OUT[kind]), words, rng) for _ in range(100))
            prompt = next((prompt for prompt in drawn if prompt not in found), None)
            if prompt is None:
                del left[kind]
            else:
                found[prompt] = kind
    return [(kind, prompt) for prompt, kind in found.items()]


def is_usable(prompt: str) -> bool:
    """Whether a prompt that the target wrote itself is one to train on: of a sane length and of no held-out kind."""
    low = prompt.lower()
    return 12 <= len(prompt) <= 600 and not any(mark in low for mark in HELD_OUT_MARKS)


def write_held_out(seed: int, count: int, path: Path) -> None:
    """A JSON line {"kind", "prompt"} per held-out prompt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": kind, "prompt": prompt} for kind, prompt in held_out_prompts(seed, count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
