"""Small Python functions made of steps, each requested in words and repeated as a comment above its code.

The training text is only the function, so that an answer can be executed against the reference.
"""

import random
from collections.abc import Callable
from typing import Any

from . import words
from .writer import Family, Writer

Answer = tuple[list[tuple[str, str]], dict[str, Any]]
Step = tuple[str, list[str]]
"""What a step does, in the imperative, and its lines of code."""

NOUNS = (
    "total price score item value list data text name word line number result record order point level width stock "
    "cost age size mark grade sample row batch part unit report table"
).split()
VERBS = "make find build get compute handle prepare collect process check convert update".split()
LIST_NAMES = "items values numbers xs data nums elements".split()
NUMBER_NAMES = "x n value number amount num k price count".split()
TEXT_NAMES = "text s word line string phrase".split()
LABELS = "low high small large short long cheap dear cold hot young old weak strong slow fast".split()
TEXTS = "hello world|level|banana split|a b c|Noon|radar|python|one two three four|Big red bus".split("|")


def _loop(name: str, test: str | None, item: str) -> list[str]:
    """The loop that builds a list, with or without a test."""
    body = [f"    result.append({item})"] if test is None else [f"    if {test}:", f"        result.append({item})"]
    return ["result = []", f"for item in {name}:", *body, f"{name} = result"]


def _keep(w: Writer, name: str, words_: str, test: str) -> Step:
    short = [f"{name} = [item for item in {name} if {test}]"]
    return words_, w.say(short, short, _loop(name, test, "item"))


def _each(w: Writer, name: str, words_: str, item: str) -> Step:
    short = [f"{name} = [{item} for item in {name}]"]
    return words_, w.say(short, short, _loop(name, None, item))


def list_step(w: Writer, name: str) -> Step:
    """One change of a list of whole numbers."""
    c, d = w.number(2, 30), w.number(2, 9)
    make: list[Callable[[], Step]] = [
        lambda: _keep(w, name, w.ask(f"keep the items above {c}", f"keep only items greater than {c}"), f"item > {c}"),
        lambda: _keep(w, name, w.ask(f"keep the items below {c}", f"keep only items less than {c}"), f"item < {c}"),
        lambda: _keep(w, name, w.ask("keep the even items", "drop the odd items"), "item % 2 == 0"),
        lambda: _keep(w, name, w.ask("keep the odd items", "drop the even items"), "item % 2 == 1"),
        lambda: _keep(w, name, w.ask(f"keep the multiples of {d}", f"keep items divisible by {d}"), f"item % {d} == 0"),
        lambda: _each(w, name, w.ask(f"add {c} to every item", f"increase each item by {c}"), f"item + {c}"),
        lambda: _each(w, name, w.ask(f"subtract {c} from every item", f"decrease each item by {c}"), f"item - {c}"),
        lambda: _each(w, name, w.ask(f"multiply every item by {d}", f"scale each item by {d}"), f"item * {d}"),
        lambda: _each(w, name, w.ask("square every item", "replace each item by its square"), "item * item"),
        lambda: (w.ask("sort the items", "put the items in order"), [f"{name} = sorted({name})"]),
        lambda: (w.ask("reverse the order", "turn the list around"), [f"{name} = {name}[::-1]"]),
        lambda: (w.ask(f"take the first {d} items", f"keep only the first {d} items"), [f"{name} = {name}[:{d}]"]),
        lambda: (w.ask(f"take the last {d} items", f"keep only the last {d} items"), [f"{name} = {name}[-{d}:]"]),
    ]
    return w.rng.choice(make)()


def list_end(w: Writer, name: str) -> Step:
    """What a list function returns."""
    loop = ["total = 0", f"for item in {name}:", "    total += item", "return total"]
    options: list[Step] = [
        (w.ask("return the sum", "return the total"), w.say([f"return sum({name})"], loop)),
        (w.ask("return the number of items", "return the count"), [f"return len({name})"]),
        (w.ask("return the largest item", "return the maximum"), [f"return max({name}, default=0)"]),
        (w.ask("return the smallest item", "return the minimum"), [f"return min({name}, default=0)"]),
        (w.ask("return the list", "return the result"), [f"return {name}"]),
    ]
    return w.rng.choice(options)


def number_step(w: Writer, name: str) -> Step:
    """One change of a whole number."""
    c, d = w.number(2, 60), w.number(2, 9)
    options: list[Step] = [
        (w.ask(f"add {c}", f"increase it by {c}"), [w.say(f"{name} = {name} + {c}", f"{name} += {c}")]),
        (w.ask(f"subtract {c}", f"decrease it by {c}"), [w.say(f"{name} = {name} - {c}", f"{name} -= {c}")]),
        (w.ask(f"multiply by {d}", f"scale it by {d}"), [w.say(f"{name} = {name} * {d}", f"{name} *= {d}")]),
        (w.ask(f"divide by {d} rounding down", f"take the whole part of dividing by {d}"), [f"{name} = {name} // {d}"]),
        (w.ask("square it", "multiply it by itself"), [w.say(f"{name} = {name} * {name}", f"{name} = {name} ** 2")]),
        (w.ask("drop the sign", "take the absolute value"), [f"{name} = abs({name})"]),
        (
            w.ask(f"limit it to at most {c}", f"cap it at {c}"),
            w.say([f"{name} = min({name}, {c})"], [f"if {name} > {c}:", f"    {name} = {c}"]),
        ),
        (
            w.ask(f"raise it to at least {c}", f"make it no less than {c}"),
            w.say([f"{name} = max({name}, {c})"], [f"if {name} < {c}:", f"    {name} = {c}"]),
        ),
    ]
    return w.rng.choice(options)


def number_end(w: Writer, name: str) -> Step:
    c, d = w.number(2, 60), w.number(2, 9)
    options: list[Step] = [
        (w.ask("return it", "return the result"), [f"return {name}"]),
        (w.ask(f"return the remainder by {d}", f"return what is left over by {d}"), [f"return {name} % {d}"]),
        (w.ask(f"tell whether it is above {c}", f"return whether it is more than {c}"), [f"return {name} > {c}"]),
        (w.ask("tell whether it is even", "return whether it is even"), [f"return {name} % 2 == 0"]),
    ]
    return w.rng.choice(options)


def text_step(w: Writer, name: str) -> Step:
    """One change of a string."""
    d, letter, other = w.number(2, 9), w.rng.choice("abcdefghiklmnoprstuw"), w.rng.choice("xyzqvj")
    options: list[Step] = [
        (w.ask("turn it into lower case", "make all letters small"), [f"{name} = {name}.lower()"]),
        (w.ask("turn it into upper case", "make all letters capital"), [f"{name} = {name}.upper()"]),
        (w.ask("reverse it", "turn it backwards"), [f"{name} = {name}[::-1]"]),
        (w.ask("remove the spaces", "delete all spaces"), [f'{name} = {name}.replace(" ", "")']),
        (
            w.ask(f"replace {letter} by {other}", f"change every {letter} to {other}"),
            [f'{name} = {name}.replace("{letter}", "{other}")'],
        ),
        (w.ask(f"keep the first {d} characters", f"cut it to {d} characters"), [f"{name} = {name}[:{d}]"]),
        (w.ask(f"keep the last {d} characters", f"take {d} characters from the end"), [f"{name} = {name}[-{d}:]"]),
        (w.ask(f"repeat it {d} times", f"write it {d} times"), [f"{name} = {name} * {d}"]),
    ]
    return w.rng.choice(options)


def text_end(w: Writer, name: str) -> Step:
    letter, d = w.rng.choice("abcdefghiklmnoprstuw"), w.number(2, 9)
    count = [
        "count = 0",
        f"for letter in {name}:",
        f'    if letter == "{letter}":',
        "        count += 1",
        "return count",
    ]
    options: list[Step] = [
        (w.ask("return it", "return the result"), [f"return {name}"]),
        (w.ask("return its length", "return the number of characters"), [f"return len({name})"]),
        (
            w.ask(f"return how often {letter} occurs", f"count the letter {letter}"),
            w.say([f'return {name}.count("{letter}")'], count),
        ),
        (w.ask("return the list of words", "split it into words"), [f"return {name}.split()"]),
        (
            w.ask(f"tell whether it is longer than {d}", f"return whether its length is above {d}"),
            [f"return len({name}) > {d}"],
        ),
        (
            w.ask("tell whether it is a palindrome", "return whether it reads the same backwards"),
            [f"return {name} == {name}[::-1]"],
        ),
    ]
    return w.rng.choice(options)


def function(w: Writer, param: str, steps: list[Step], example: Callable[[random.Random], Any]) -> Answer:
    """Request and function of the given steps; on the held-out side also tests, by running the reference."""
    name = f"{w.rng.choice(VERBS)}_{w.rng.choice(NOUNS)}"
    name += f"_{w.rng.choice(NOUNS)}" if w.chance(0.3) else ""
    w.note((name, param))
    phrases = [phrase for phrase, _ in steps]
    listed = "\n".join(f"{i}. {phrase}" for i, phrase in enumerate(phrases, 1))
    row = ", ".join(phrases[:-1]) + " and " + phrases[-1] if len(phrases) > 1 else phrases[0]
    request = w.ask(
        f"Write a function {name}({param}) with these steps:\n{listed}",
        f"Define {name}({param}). It should do this:\n{listed}",
        f"Write a Python function {name}({param}). It should {row}.",
        f"I need a function {name} with parameter {param} that does the following: {row}.",
        f"Please write {name}({param}). The steps are: {'; '.join(phrases)}.",
    )
    doc = w.say(row.capitalize() + ".", f"Take {param}, {row}.")
    lines = [f'    """{doc}"""']
    for phrase, code in steps:
        lines += [f"    # {phrase.capitalize()}.", *("    " + line for line in code)]
    source = f"def {name}({param}):\n" + "\n".join(lines)
    check: dict[str, Any] = {}
    if w.held_out:
        rng = random.Random(words.digest(request))
        scope: dict[str, Any] = {}
        exec(source, scope)  # our own text, two lines above
        arguments = [[example(rng)] for _ in range(8)]
        check = {"name": name, "tests": [[args, repr(scope[name](*args))] for args in arguments]}
    return [(request, source)], check


def list_function(w: Writer) -> Answer:
    name = w.one(LIST_NAMES)
    steps = [list_step(w, name) for _ in range(w.ask(1, 2, 3, 4))] + [list_end(w, name)]
    return function(w, name, steps, lambda rng: [rng.randint(-9, 40) for _ in range(rng.randint(4, 10))])


def number_function(w: Writer) -> Answer:
    name = w.one(NUMBER_NAMES)
    steps = [number_step(w, name) for _ in range(w.ask(1, 2, 3, 4, 5))] + [number_end(w, name)]
    return function(w, name, steps, lambda rng: rng.randint(-30, 90))


def text_function(w: Writer) -> Answer:
    name = w.one(TEXT_NAMES)
    steps = [text_step(w, name) for _ in range(w.ask(1, 2, 3, 4))] + [text_end(w, name)]
    return function(w, name, steps, lambda rng: rng.choice(TEXTS))


def grade_function(w: Writer) -> Answer:
    """Labels by bounds, from low to high."""
    name, labels = w.one(NUMBER_NAMES), w.rng.sample(LABELS, w.ask(3, 4, 5, 6))
    bounds = sorted(w.rng.sample(range(2, 80), len(labels) - 1))
    w.note(tuple(bounds))
    word, steps = w.ask("below", "less than", "under"), []
    for label, bound in zip(labels, bounds, strict=False):
        steps.append((f"return {label} if it is {word} {bound}", [f"if {name} < {bound}:", f'    return "{label}"']))
    steps.append((f"otherwise return {labels[-1]}", [f'return "{labels[-1]}"']))
    return function(w, name, steps, lambda rng: rng.choice(bounds) + rng.randint(-12, 12))


FAMILIES: list[Family] = [*3 * [list_function], *2 * [number_function], *2 * [text_function], grade_function]
