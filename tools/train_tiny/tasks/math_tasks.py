"""Word problems solved one step a line. Every step is one small sum or a product of the times tables."""

import itertools
from typing import Any

from . import words
from .writer import Family, Writer

Answer = tuple[list[tuple[str, str]], dict[str, Any]]


def solved(request: str, steps: list[str], result: int) -> Answer:
    return [(request, "\n".join(steps) + f"\nAnswer: {result}")], {"expected": str(result)}


def stock(w: Writer) -> Answer:
    """A store of things goes up and down."""
    p, thing, total = w.name(), w.one(words.THINGS), w.number(5, 40)
    he = words.pronoun(p).lower()
    text = [w.ask(f"{p} has {total} {thing}.", f"{p} starts with {total} {thing}.", f"{p} owns {total} {thing}.")]
    steps = [w.say(f"{p} starts with {total} {thing}.", f"At first {p} has {total} {thing}.")]
    for _ in range(w.ask(2, 3, 4, 5, 6, 7)):
        up = total < 12 or (total < 90 and w.chance(0.5))
        step = w.number(2, 25 if up else min(25, total - 2))
        other = w.name() if w.chance(0.4) else None
        if up:
            event = f"{other} gives {p} {step} more" if other else f"{he} {w.ask('buys', 'finds', 'gets')} {step} more"
            after, sign = total + step, "+"
        else:
            event = f"{he} gives {step} to {other}" if other else f"{he} {w.ask('loses', 'sells', 'uses')} {step}"
            after, sign = total - step, "-"
        text.append(w.ask("Then ", "Later ", "Next ") + event + ".")
        opener = w.say("Then", "After that", "Next")
        steps.append(f"{opener} {event}, so {w.say('there are', p + ' has')} {total} {sign} {step} = {after} {thing}.")
        total = after
    text.append(w.ask(f"How many {thing} does {p} have now?", f"How many {thing} does {p} have in the end?"))
    steps.append(w.say(f"{p} has {total} {thing} in the end.", f"So in the end {p} has {total} {thing}."))
    return solved(" ".join(text), steps, total)


def shopping(w: Writer) -> Answer:
    """Several goods, the bill and the change."""
    p, kinds = w.name(), [w.one(words.THINGS) for _ in range(w.ask(2, 3, 4))]
    lines = [(w.number(2, 9), w.number(2, 9), kind) for kind in kinds]
    costs = [count * price for count, price, _ in lines]
    total = sum(costs)
    paid = next(note for note in (50, 100, 150, 200, 250, 300, 350) if note >= total)
    bought = [f"{count} {kind} at {price} dollars each" for count, price, kind in lines]
    basket = ", ".join(bought[:-1]) + " and " + bought[-1]
    request = w.ask(
        f"{p} buys {basket}. {words.pronoun(p)} pays with {paid} dollars.",
        f"At the shop {p} takes {basket} and pays with {paid} dollars.",
    ) + w.ask(f" How much change does {p} get?", f" How many dollars does {p} get back?", " How much change is there?")
    steps = [
        w.say(f"The {kind} cost", f"For the {kind}:") + f" {count} * {price} = {cost} dollars."
        for (count, price, kind), cost in zip(lines, costs, strict=True)
    ]
    running = costs[0]
    for cost, kind in zip(costs[1:], kinds[1:], strict=True):
        head = w.say(f"With the {kind} that is", f"Adding the {kind} gives")
        steps.append(f"{head} {running} + {cost} = {running + cost} dollars.")
        running += cost
    steps.append(w.say("The change is", f"{p} gets back") + f" {paid} - {total} = {paid - total} dollars.")
    return solved(request, steps, paid - total)


def comparison(w: Writer) -> Answer:
    """A chain of people, each with more or fewer things than the one before."""
    thing, amount = w.one(words.THINGS), w.number(6, 30)
    people = [w.name() for _ in range(w.ask(2, 3, 4, 5))]
    amounts = [amount]
    text = [w.ask(f"{people[0]} has {amount} {thing}.", f"{people[0]} collects {amount} {thing}.")]
    steps = [w.say(f"{people[0]} has {amount} {thing}.", f"We know that {people[0]} has {amount} {thing}.")]
    for before, person in itertools.pairwise(people):
        last, kind = amounts[-1], w.ask("more", "fewer", "more", "twice")
        if kind == "twice" and last <= 30:
            text.append(f"{person} has twice as many {thing} as {before}.")
            why, formula, after = "twice as many as", f"2 * {last}", 2 * last
        elif kind == "fewer" and last > 6:
            step = w.number(2, min(15, last - 3))
            text.append(f"{person} has {step} fewer than {before}.")
            why, formula, after = "fewer than", f"{last} - {step}", last - step
        else:
            step = w.number(2, 18)
            text.append(f"{person} has {step} more than {before}.")
            why, formula, after = "more than", f"{last} + {step}", last + step
        steps.append(f"{person} has {w.say(f'{why} {before}: ', '')}{formula} = {after} {thing}.")
        amounts.append(after)
    if w.ask(True, False):
        text.append(w.ask(f"How many {thing} do they have together?", f"How many {thing} do they have in total?"))
        running = amounts[0]
        for amount in amounts[1:]:
            head = w.say("Adding up", "Together so far", "The sum grows")
            steps.append(f"{head}: {running} + {amount} = {running + amount}.")
            running += amount
        steps.append(w.say(f"Together they have {running} {thing}.", f"In total there are {running} {thing}."))
        return solved(" ".join(text), steps, running)
    text.append(w.ask(f"How many {thing} does {people[-1]} have?", f"What number of {thing} does {people[-1]} have?"))
    return solved(" ".join(text), steps, amounts[-1])


def trip(w: Writer) -> Answer:
    """Several legs at constant speed."""
    p, vehicles = w.name(), w.rng.sample(["walks", "runs", "rides", "drives", "sails"], w.ask(2, 3, 4))
    legs = [(v, w.number(2, 9), w.number(3, 12)) for v in vehicles]
    he = words.pronoun(p)
    parts = [f"{p if not i else he} {v} for {h} hours at {s} km per hour." for i, (v, h, s) in enumerate(legs)]
    for i in range(1, len(parts)):
        parts[i] = w.ask("Then ", "After that ") + parts[i][0].lower() + parts[i][1:]
    request = " ".join(parts) + w.ask(
        " How far is that in total?", f" How many km does {p} cover?", " What is the whole distance?"
    )
    steps, running = [], 0
    for i, (v, h, s) in enumerate(legs):
        head = w.say(f"{p} {v} {h} * {s} = {h * s} km", f"In {h} hours {p} {v} {h} * {s} = {h * s} km")
        steps.append(head + "." if not i else f"{head}, which makes {running} + {h * s} = {running + h * s} km.")
        running += h * s
    steps.append(w.say(f"The whole distance is {running} km.", f"In total {p} covers {running} km."))
    return solved(request, steps, running)


def saving(w: Writer) -> Answer:
    """A fixed amount every week, then a purchase."""
    p, thing, start, rate = w.name(), w.one(words.GOODS), w.number(5, 40), w.number(3, 15)
    weeks, unit = w.number(3, 8), w.ask("week", "day", "month")
    he = words.pronoun(p)
    total = start + weeks * rate
    price = w.number(4, min(60, total - 1))
    request = w.ask(
        f"{p} has {start} dollars and saves {rate} dollars every {unit} for {weeks} {unit}s.",
        f"{p} starts with {start} dollars. Every {unit} {he.lower()} saves {rate} dollars, for {weeks} {unit}s.",
    ) + w.ask(
        f" Then {he.lower()} buys {thing} for {price} dollars. How many dollars are left?",
        f" {he} spends {price} dollars on {thing}. How much money does {p} have left?",
    )
    steps, running = [w.say(f"{p} starts with {start} dollars.", f"At first {p} has {start} dollars.")], start
    for i in range(1, weeks + 1):
        head = w.say(f"After {unit} {i} there are", f"In {unit} {i} it grows to")
        steps.append(f"{head} {running} + {rate} = {running + rate} dollars.")
        running += rate
    head = w.say(f"After paying for the {thing}", f"{p} pays for the {thing}, so")
    steps.append(f"{head} {total} - {price} = {total - price} dollars are left.")
    return solved(request, steps, total - price)


def sharing(w: Writer) -> Answer:
    """Full boxes, some things added or lost, the rest shared equally."""
    p, thing, box = w.name(), w.one(words.THINGS), w.one(words.BOXES)
    while True:
        boxes, each, people, share = (w.rng.randint(2, 9) for _ in range(4))
        change = people * share - boxes * each
        if 0 < abs(change) <= 20:
            break
    w.note((boxes, each, people, share))
    full, left, who = boxes * each, people * share, w.ask("friends", "children", "cousins", "neighbours")
    he, count = words.pronoun(p), abs(change)
    verb, more = (w.ask("finds", "buys"), " more") if change > 0 else (w.ask("loses", "sells"), "")
    event = f"{he} {verb} {count}{more}"
    request = w.ask(
        f"{p} has {boxes} {box} with {each} {thing} in each.", f"{p} packs {boxes} {box} with {each} {thing} each."
    )
    request += f" {event}. " + w.ask(
        f"Then {he.lower()} shares all {thing} equally among {people} {who}. How many {thing} does each one get?",
        f"{people} {who} share all the {thing} equally. How many {thing} are there for each?",
    )
    sign = "+" if change > 0 else "-"
    steps = [
        w.say(
            f"The {box} hold {boxes} * {each} = {full} {thing}.",
            f"{boxes} {box} with {each} {thing} make {boxes} * {each} = {full}.",
        ),
        w.say("Then", "After that")
        + f" {event[0].lower()}{event[1:]}, so there are {full} {sign} {count} = {left} {thing}.",
        w.say(f"Shared among {people} {who}", f"For {people} {who}")
        + f" that is {left} / {people} = {share} {thing} each.",
    ]
    return solved(request, steps, share)


def seats(w: Writer) -> Answer:
    """A product of a two-digit number, split into tens and ones."""
    p, thing, box = w.name(), w.one(words.THINGS), w.one(words.BOXES)
    tens, ones, times = w.number(1, 4), w.number(1, 9), w.number(2, 9)
    each = 10 * tens + ones
    high, low = 10 * tens * times, ones * times
    request = w.ask(
        f"{p} has {times} {box} with {each} {thing} in each.",
        f"There are {times} {box} at {p}'s house, each with {each} {thing}.",
    )
    form = w.ask("How many {t} are there?", "What is the total number of {t}?", "How many {t} is that in total?")
    request += " " + form.format(t=thing)
    steps = [
        w.say(f"We need {times} * {each}.", f"The total is {times} * {each}."),
        w.say("First the tens", "The tens give") + f": {times} * {10 * tens} = {high}.",
        w.say("Then the ones", "The ones give") + f": {times} * {ones} = {low}.",
        w.say("Together", "The sum is") + f": {high} + {low} = {high + low}.",
    ]
    return solved(request, steps, high + low)


def ages(w: Writer) -> Answer:
    """Ages relative to each other and to later years."""
    people, age, years = [w.name() for _ in range(w.ask(2, 3, 4, 5))], w.number(8, 40), w.number(2, 15)
    text, steps = [w.ask(f"{people[0]} is {age} years old.", f"The age of {people[0]} is {age}.")], []
    for before, person in itertools.pairwise(people):
        older = age < 12 or w.chance(0.5)
        step = w.number(2, 15 if older else min(15, age - 4))
        text.append(f"{person} is {step} years {'older' if older else 'younger'} than {before}.")
        after = age + step if older else age - step
        formula = f"{age} {'+' if older else '-'} {step} = {after}"
        steps.append(w.say(f"{person} is {formula} years old.", f"The age of {person} is {formula}."))
        age = after
    person = people[-1]
    form = w.ask("How old will {p} be in {y} years?", "What will be the age of {p} after {y} years?")
    text.append(form.format(p=person, y=years))
    steps.append(f"{w.say('In', 'After')} {years} years {person} will be {age} + {years} = {age + years} years old.")
    return solved(" ".join(text), steps, age + years)


FAMILIES: list[Family] = [stock, stock, shopping, shopping, comparison, comparison, trip, saving, sharing, seats, ages]
